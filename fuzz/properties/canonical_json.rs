//! What must hold for any bytes as JSON: its canonical form, and which texts have the same.

use onlyonce_core::fingerprint::{JsonErrorKind, canonical_json};
use serde_json::Value;

use super::json::{agrees_with_another_reader, respaced, shape};

/// Takes `TEXT`, or `TEXT\0TEXT`.
///
/// # Panics
/// When something does not hold.
pub(crate) fn check(data: &[u8]) {
    let mut texts = data.splitn(2, |byte| *byte == 0);
    let (first, second) = (texts.next().unwrap_or_default(), texts.next());
    let one = canonical(first);
    let Some(second) = second else { return };
    let (Some(one), Some(other)) = (one, canonical(second)) else { return };
    if let (Some(a), Some(b)) = (Numeral::read(first), Numeral::read(second)) {
        assert_eq!(a == b, one == other, "{a:?} {b:?}");
    }
    if let (Ok(a), Ok(b)) = (serde_json::from_slice::<Value>(first), serde_json::from_slice::<Value>(second))
    {
        let same = shape(&a) == shape(&b);
        assert!(same || one != other, "two meanings, one form");
        if same && a == b && !has_floats(&a) {
            assert_eq!(one, other, "one meaning, two forms");
        }
    }
}

fn canonical(text: &[u8]) -> Option<Vec<u8>> {
    agrees_with_another_reader(text);
    let form = match canonical_json(text) {
        Ok(form) => form,
        Err(error) => {
            assert!(!error.to_string().contains(char::is_control), "{error:?}");
            return None;
        }
    };
    assert_eq!(canonical_json(&form).expect("it is JSON"), form, "it is its own form");
    assert_eq!(canonical_json(&respaced(text)).expect("spaces mean nothing"), form);
    assert!(!form.contains(&b'\n') && std::str::from_utf8(&form).is_ok());
    let listed = [b"[", text, b"]"].concat();
    match canonical_json(&listed) {
        Ok(in_list) => assert_eq!(in_list, [b"[", &form[..], b"]"].concat()),
        Err(error) => assert_eq!(error.kind(), JsonErrorKind::TooDeep),
    }
    let (theirs, of_form) = (serde_json::from_slice::<Value>(text), serde_json::from_slice::<Value>(&form));
    if let (Ok(theirs), Ok(of_form)) = (theirs, of_form) {
        assert_eq!(shape(&theirs), shape(&of_form));
    }
    Some(form)
}

fn has_floats(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(items) => items.iter().any(has_floats),
        Value::Object(members) => members.values().any(has_floats),
        _ => false,
    }
}

/// A numeral as its digits without zeros at either end, and the power of ten of the last one.
#[derive(Debug, PartialEq)]
struct Numeral {
    negative: bool,
    digits: String,
    power: i64,
}

impl Numeral {
    /// Of a text that is nothing else.
    fn read(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?.trim_matches([' ', '\t', '\n', '\r']);
        if !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-')) {
            return None;
        }
        let (mantissa, power) = match text.to_ascii_lowercase().split_once('e') {
            Some((mantissa, power)) => (mantissa.to_owned(), power.parse::<i64>().ok()?),
            None => (text.to_owned(), 0),
        };
        let fraction = mantissa.split_once('.').map_or(0, |(_, fraction)| fraction.len());
        let all: String = mantissa.chars().filter(char::is_ascii_digit).collect();
        let kept = all.trim_end_matches('0');
        let power = power - fraction as i64 + (all.len() - kept.len()) as i64;
        let digits = kept.trim_start_matches('0').to_owned();
        let is_zero = digits.is_empty();
        let negative = text.starts_with('-') && !is_zero;
        Some(Self { negative, digits, power: if is_zero { 0 } else { power } })
    }
}
