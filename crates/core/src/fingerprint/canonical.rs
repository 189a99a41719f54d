//! The canonical form of a JSON value: RFC 8785, with numbers kept exact.
//!
//! RFC 8785 turns each numeral into a double and writes the double as ECMAScript does. That makes
//! 653247040368672768 and 653247040368672800 the same amount, and with it two payments one. Here a numeral is
//! read as the exact decimal it is, and its digits are laid out by ECMAScript's rules. The two agree byte for byte
//! wherever a numeral is the shortest one for its double, as every RFC 8785 writer emits it; where a numeral
//! says more than a double holds, all of it is kept. So `1`, `1.0` and `1e0` are equal, and a canonical text by
//! RFC 8785 is its own canonical form here.

use std::io::Write as _;

use super::json::{JsonError, JsonErrorKind, Numeral, Value};

/// Writes the canonical form of a JSON text.
///
/// # Errors
/// [`JsonError`] when the text is not JSON, or not JSON that has one meaning: duplicate members, lone
/// surrogates, deeper than 128 levels.
///
/// ```
/// use onlyonce_core::fingerprint::canonical_json;
///
/// assert_eq!(canonical_json(br#" { "b" : 1.50, "a" : 653247040368672768 } "#)?, br#"{"a":653247040368672768,"b":1.5}"#);
/// # Ok::<(), onlyonce_core::fingerprint::JsonError>(())
/// ```
pub fn canonical_json(text: &[u8]) -> Result<Vec<u8>, JsonError> {
    let value = super::json::parse(text)?;
    let mut out = Vec::with_capacity(text.len());
    write_value(&mut out, &value)?;
    Ok(out)
}

pub(super) fn write_value(out: &mut Vec<u8>, value: &Value<'_>) -> Result<(), JsonError> {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(true) => out.extend_from_slice(b"true"),
        Value::Bool(false) => out.extend_from_slice(b"false"),
        Value::Number(numeral) => write_number(out, *numeral)?,
        Value::String(text) => write_string(out, text),
        Value::Array(items) => {
            write_list(out, b"[]", items.iter(), |out, item| write_value(out, item))?;
        }
        Value::Object(members) => write_list(out, b"{}", members.iter(), |out, member| {
            write_string(out, &member.name);
            out.push(b':');
            write_value(out, &member.value)
        })?,
    }
    Ok(())
}

/// Writes items between brackets, commas between them.
pub(super) fn write_list<T>(
    out: &mut Vec<u8>,
    brackets: &[u8; 2],
    items: impl Iterator<Item = T>,
    mut write: impl FnMut(&mut Vec<u8>, T) -> Result<(), JsonError>,
) -> Result<(), JsonError> {
    out.push(brackets[0]);
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push(b',');
        }
        write(out, item)?;
    }
    out.push(brackets[1]);
    Ok(())
}

pub(super) fn write_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    for byte in text.bytes() {
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            0x08 => out.extend_from_slice(b"\\b"),
            0x09 => out.extend_from_slice(b"\\t"),
            0x0a => out.extend_from_slice(b"\\n"),
            0x0c => out.extend_from_slice(b"\\f"),
            0x0d => out.extend_from_slice(b"\\r"),
            0..0x20 => write!(out, "\\u{byte:04x}").expect("writing to memory cannot fail"),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

/// The digits of an exponent, as it is written and as it becomes.
const EXPONENT_DIGITS_MAX: usize = 15;

/// An exact decimal: 0.DIGITS × 10^point, no zero at either end of the digits. Zero has no digits.
struct Decimal {
    negative: bool,
    digits: Vec<u8>,
    point: i64,
}

impl Decimal {
    fn read(numeral: Numeral<'_>) -> Result<Self, JsonError> {
        let (negative, unsigned) = match numeral.text.strip_prefix('-') {
            Some(unsigned) => (true, unsigned),
            None => (false, numeral.text),
        };
        let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, read_exponent(exponent, numeral.at)?),
            None => (unsigned, 0),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all = || whole.bytes().chain(fraction.bytes());
        let leading = all().take_while(|b| *b == b'0').count();
        let mut digits: Vec<u8> = all().skip(leading).collect();
        digits.truncate(digits.iter().rposition(|b| *b != b'0').map_or(0, |last| last + 1));
        // A length of text in memory is far from the ends of i64, and an exponent has 15 digits at most.
        let point = whole.len() as i64 - leading as i64 + exponent;
        Ok(Self { negative, digits, point })
    }
}

fn read_exponent(text: &str, at: usize) -> Result<i64, JsonError> {
    let (negative, digits) = match text.as_bytes()[0] {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let digits = digits.trim_start_matches('0');
    if digits.len() > EXPONENT_DIGITS_MAX {
        return Err(JsonError::new(JsonErrorKind::ExponentTooLong, at));
    }
    let exponent = digits.bytes().fold(0, |sum, b| sum * 10 + i64::from(b - b'0'));
    Ok(if negative { -exponent } else { exponent })
}

/// Lays the digits out as ECMAScript's Number::toString does (ECMA-262, §6.1.6.1.20), whatever their number.
fn write_number(out: &mut Vec<u8>, numeral: Numeral<'_>) -> Result<(), JsonError> {
    let Decimal { negative, digits, point } = Decimal::read(numeral)?;
    if digits.is_empty() {
        out.push(b'0');
        return Ok(());
    }
    if negative {
        out.push(b'-');
    }
    let len = digits.len() as i64;
    let zeros = |n: i64| std::iter::repeat_n(b'0', n.unsigned_abs() as usize);
    if len <= point && point <= 21 {
        out.extend_from_slice(&digits);
        out.extend(zeros(point - len));
    } else if 0 < point && point <= 21 {
        let (whole, fraction) = digits.split_at(point as usize);
        out.extend_from_slice(whole);
        out.push(b'.');
        out.extend_from_slice(fraction);
    } else if -6 < point && point <= 0 {
        out.extend_from_slice(b"0.");
        out.extend(zeros(point));
        out.extend_from_slice(&digits);
    } else {
        out.push(digits[0]);
        if digits.len() > 1 {
            out.push(b'.');
            out.extend_from_slice(&digits[1..]);
        }
        let exponent = point - 1;
        // The digits before the point have moved into it: what is written must be readable again.
        if exponent.unsigned_abs() >= 10u64.pow(EXPONENT_DIGITS_MAX as u32) {
            return Err(JsonError::new(JsonErrorKind::ExponentTooLong, numeral.at));
        }
        write!(out, "e{}{}", if exponent < 0 { '-' } else { '+' }, exponent.unsigned_abs())
            .expect("writing to memory cannot fail");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn canonical(text: &str) -> String {
        String::from_utf8(canonical_json(text.as_bytes()).expect(text)).unwrap()
    }

    /// RFC 8785, appendix B: doubles by their bits, and how they are written.
    const APPENDIX_B: &[(u64, &str)] = &[
        (0x0000000000000000, "0"),
        (0x8000000000000000, "0"),
        (0x0000000000000001, "5e-324"),
        (0x8000000000000001, "-5e-324"),
        (0x7fefffffffffffff, "1.7976931348623157e+308"),
        (0xffefffffffffffff, "-1.7976931348623157e+308"),
        (0x4340000000000000, "9007199254740992"),
        (0xc340000000000000, "-9007199254740992"),
        (0x4430000000000000, "295147905179352830000"),
        (0x44b52d02c7e14af5, "9.999999999999997e+22"),
        (0x44b52d02c7e14af6, "1e+23"),
        (0x44b52d02c7e14af7, "1.0000000000000001e+23"),
        (0x444b1ae4d6e2ef4e, "999999999999999700000"),
        (0x444b1ae4d6e2ef4f, "999999999999999900000"),
        (0x444b1ae4d6e2ef50, "1e+21"),
        (0x3eb0c6f7a0b5ed8c, "9.999999999999997e-7"),
        (0x3eb0c6f7a0b5ed8d, "0.000001"),
        (0x41b3de4355555553, "333333333.3333332"),
        (0x41b3de4355555554, "333333333.33333325"),
        (0x41b3de4355555555, "333333333.3333333"),
        (0x41b3de4355555556, "333333333.3333334"),
        (0x41b3de4355555557, "333333333.33333343"),
        (0xbecbf647612f3696, "-0.0000033333333333333333"),
        (0x43143ff3c1cb0959, "1424953923781206.2"),
    ];

    #[test]
    fn rfc_8785_appendix_b() {
        for (bits, written) in APPENDIX_B {
            let double = f64::from_bits(*bits);
            assert_eq!(written.parse::<f64>().unwrap(), double, "names this double");
            assert_eq!(canonical(written), *written, "its own canonical form");
            // Of two shortest numerals equally near to the last double, Rust prints the other one.
            if *bits != 0x43143ff3c1cb0959 {
                assert_eq!(canonical(&format!("{double}")), *written, "{bits:016x}");
                assert_eq!(canonical(&format!("{double:e}")), *written, "{bits:016x}");
            }
        }
        for not_a_number in ["NaN", "Infinity", "-Infinity"] {
            assert!(canonical_json(not_a_number.as_bytes()).is_err());
        }
    }

    #[test]
    fn rfc_8785_section_3_2_2_sample() {
        let sample = r#"{
            "numbers": [NUMERAL, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
            "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
            "literals": [null, true, false]
        }"#;
        let expected = r#"{"literals":[null,true,false],"numbers":[NUMERAL,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}"#;
        // The shortest numeral of the double gives the bytes of the RFC …
        let shortest = sample.replace("NUMERAL", "333333333.3333333");
        assert_eq!(canonical(&shortest), expected.replace("NUMERAL", "333333333.3333333"));
        // … and the one digit that the RFC's sample loses in a double is kept: the one intended difference.
        let published = sample.replace("NUMERAL", "333333333.33333329");
        assert_eq!(canonical(&published), expected.replace("NUMERAL", "333333333.33333329"));
    }

    #[test]
    fn rfc_8785_section_3_2_3_sorting() {
        let sample = r#"{
            "\u20ac": "Euro Sign",
            "\r": "Carriage Return",
            "\ufb33": "Hebrew Letter Dalet With Dagesh",
            "1": "One",
            "\ud83d\ude00": "Emoji: Grinning Face",
            "\u0080": "Control",
            "\u00f6": "Latin Small Letter O With Diaeresis"
        }"#;
        let expected = "{\"\\r\":\"Carriage Return\",\"1\":\"One\",\"\u{80}\":\"Control\",\
            \"ö\":\"Latin Small Letter O With Diaeresis\",\"€\":\"Euro Sign\",\
            \"😀\":\"Emoji: Grinning Face\",\"\u{fb33}\":\"Hebrew Letter Dalet With Dagesh\"}";
        assert_eq!(canonical(sample), expected);
    }

    // As ECMAScript's JSON.stringify does: two letters where there are two, else four digits.
    #[test]
    fn escapes_are_the_short_ones() {
        let every: String = (0..0x20).map(|code| format!("\\u{code:04x}")).collect();
        assert_eq!(
            canonical(&format!(r#""{every}\u0022\u005c\u002f\u007f""#)),
            concat!(
                r#""\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f"#,
                r#"\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f"#,
                "\\\"\\\\/\u{7f}\""
            )
        );
        assert_eq!(canonical(r#""\b\f\n\r\t\"\\\/""#), r#""\b\f\n\r\t\"\\/""#);
    }

    #[test]
    fn numerals_are_exact() {
        for (a, b) in [
            ("653247040368672768", "653247040368672800"),
            ("0.1", "0.10000000000000001"),
            ("1e400", "1e401"),
            ("1e-400", "0"),
            ("9007199254740993", "9007199254740992"),
        ] {
            assert_ne!(canonical(a), canonical(b));
        }
        for (same, written) in [
            (&["1", "1.0", "1e0", "10e-1", "0.1e1", "1E+00", "100.00e-002"][..], "1"),
            (&["0", "-0", "0.0", "-0e5", "0e-7", "0E+999999999999999"], "0"),
            (&["100", "1e2", "1.00e2"], "100"),
            (&["1e21", "1000000000000000000000"], "1e+21"),
            (&["1e20", "100000000000000000000"], "100000000000000000000"),
            (&["0.000001", "1e-6"], "0.000001"),
            (&["0.0000001", "1e-7", "10e-8"], "1e-7"),
            (&["1234567890123456789012345"], "1.234567890123456789012345e+24"),
            (&["123456789.12345678901234567890"], "123456789.1234567890123456789"),
        ] {
            for text in same {
                assert_eq!(canonical(text), written, "{text}");
            }
        }
        assert_eq!(canonical("10e999999999999998"), "1e+999999999999999");
        assert_eq!(canonical("0.1e-999999999999998"), "1e-999999999999999");
        // One that is short enough as it is written, and not in the form that it would get.
        for text in ["[1e1234567890123456]", "[10e999999999999999]", "[0.1e-999999999999999]"] {
            let long = canonical_json(text.as_bytes()).unwrap_err();
            assert_eq!((long.kind(), long.at()), (JsonErrorKind::ExponentTooLong, 1), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_double_agrees_with_the_rfc(bits in any::<u64>()) {
            let double = f64::from_bits(bits);
            prop_assume!(double.is_finite());
            let written = canonical(&format!("{double:e}"));
            prop_assert_eq!(canonical(&written), written.clone());
            prop_assert_eq!(written.parse::<f64>().unwrap() + 0.0, double + 0.0);
        }

        #[test]
        fn any_bytes_are_read_or_refused(text in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = canonical_json(&text);
        }

        #[test]
        fn json_like_bytes_are_read_or_refused(text in r#"[\[\]{}":,0-9eE.+\-tfn \\u"ab]{0,40}"#) {
            if let Ok(once) = canonical_json(text.as_bytes()) {
                prop_assert_eq!(canonical_json(&once).unwrap(), once);
            }
        }

        #[test]
        fn strings_come_back(text in any::<String>()) {
            let written = canonical_json(&serde_json::to_vec(&text).unwrap()).unwrap();
            prop_assert_eq!(serde_json::from_slice::<String>(&written).unwrap(), text);
        }

        #[test]
        fn member_order_and_space_do_not_matter(members in prop::collection::btree_map(any::<String>(), any::<i64>(), 0..8)) {
            let forward = serde_json::to_vec(&members).unwrap();
            let mut backward = String::from("{");
            for (i, (name, value)) in members.iter().rev().enumerate() {
                backward += if i > 0 { " ,\n" } else { "\t" };
                backward += &format!("{} : {value}", serde_json::to_string(name).unwrap());
            }
            backward.push('}');
            prop_assert_eq!(canonical_json(backward.as_bytes()).unwrap(), canonical_json(&forward).unwrap());
        }
    }
}
