//! The effect of the operation, as a number that somebody else shows: a URL or a command.

use std::fmt;
use std::time::Duration;

use http::Method;
use serde_json::Value;

use crate::options::EffectSource;
use crate::shell;
use crate::stop::Stop;
use crate::wire::{Call, Wire};

const SCALE: u32 = 9;

/// A decimal number with up to nine digits after the point; money must not become a double.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amount(i128);

impl Amount {
    /// The first number in a text.
    pub(crate) fn find(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let start = bytes.iter().position(u8::is_ascii_digit)?;
        let end =
            text[start..].find(|c: char| !c.is_ascii_digit() && c != '.').map_or(text.len(), |n| start + n);
        // A dash within a word, as in `pay-100`, is not a sign.
        let before = start.checked_sub(2).map(|at| bytes[at]);
        let negative =
            start > 0 && bytes[start - 1] == b'-' && !before.is_some_and(|b| b.is_ascii_alphanumeric());
        let (whole, fraction) = text[start..end].split_once('.').unwrap_or((&text[start..end], ""));
        let fraction: String =
            fraction.chars().take_while(char::is_ascii_digit).take(SCALE as usize).collect();
        let scaled = 10_i128.pow(SCALE - u32::try_from(fraction.len()).ok()?);
        let fraction = if fraction.is_empty() { 0 } else { fraction.parse::<i128>().ok()? * scaled };
        let value = whole.parse::<i128>().ok()?.checked_mul(10_i128.pow(SCALE))?.checked_add(fraction)?;
        Some(Self(if negative { -value } else { value }))
    }

    fn of(value: &Value) -> Option<Self> {
        match value {
            Value::Number(number) => Self::find(&number.to_string()),
            Value::String(text) => Self::find(text),
            Value::Array(items) => Some(Self(i128::try_from(items.len()).ok()? * 10_i128.pow(SCALE))),
            _ => None,
        }
    }

    /// The step from an earlier value to this one.
    pub(crate) fn since(self, before: Self) -> Self {
        Self(self.0.saturating_sub(before.0))
    }

    pub(crate) fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// How many steps of `unit` this is, when it is a whole number of them.
    pub(crate) fn count(self, unit: Self) -> Option<i64> {
        if unit.0 == 0 || self.0 % unit.0 != 0 { None } else { i64::try_from(self.0 / unit.0).ok() }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scale = 10_u128.pow(SCALE);
        let (whole, fraction) = (self.0.unsigned_abs() / scale, self.0.unsigned_abs() % scale);
        let sign = if self.0 < 0 { "-" } else { "" };
        if fraction == 0 {
            return write!(f, "{sign}{whole}");
        }
        let fraction = format!("{fraction:09}");
        write!(f, "{sign}{whole}.{}", fraction.trim_end_matches('0'))
    }
}

/// Reads the effect.
#[derive(Debug)]
pub(crate) enum Probe {
    Url { wire: Wire, call: Call, pointer: Option<String> },
    Command { command: String, timeout: Duration },
}

impl Probe {
    /// `wire` leads to the source's host, where it is a URL.
    pub(crate) fn new(
        source: &EffectSource,
        wire: Option<Wire>,
        shared: &[(String, String)],
        timeout: Duration,
    ) -> Self {
        match (source, wire) {
            (EffectSource::Url { url, pointer, headers }, Some(wire)) => {
                let own = |name: &str| headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name));
                let shared = shared.iter().filter(|(name, _)| !own(name) && !is_about_the_body(name));
                let headers = headers.iter().chain(shared).map(|(n, v)| (n.clone(), v.clone().into_bytes()));
                let call = Call {
                    method: Method::GET,
                    target: url.path.clone(),
                    headers: headers.collect(),
                    body: bytes::Bytes::new(),
                };
                Self::Url { wire, call, pointer: pointer.clone() }
            }
            (EffectSource::Url { .. }, None) => unreachable!("a URL comes with its wire"),
            (EffectSource::Command(command), _) => Self::Command { command: command.clone(), timeout },
        }
    }

    /// The number as it is now.
    pub(crate) async fn read(&self) -> Result<Amount, Stop> {
        match self {
            Self::Url { wire, call, pointer } => {
                let answer = match wire.send(call).await? {
                    Ok(answer) => answer,
                    Err(why) => return Err(Stop::Unseen(why)),
                };
                if !(200..300).contains(&answer.status) {
                    return Err(Stop::Probe(format!("the effect URL answered {}", answer.status)));
                }
                from_body(&answer.body, pointer.as_deref()).map_err(Stop::Probe)
            }
            Self::Command { command, timeout } => run(command, *timeout).await.map_err(Stop::Probe),
        }
    }
}

fn is_about_the_body(name: &str) -> bool {
    name.len() >= 8 && name[..8].eq_ignore_ascii_case("content-")
}

fn from_body(body: &[u8], pointer: Option<&str>) -> Result<Amount, String> {
    let Some(pointer) = pointer else {
        let text = String::from_utf8_lossy(body);
        return Amount::find(&text)
            .ok_or_else(|| "there is no number in the answer of the effect URL".into());
    };
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| format!("the answer of the effect URL is not JSON: {error}"))?;
    let found =
        value.pointer(pointer).ok_or_else(|| format!("the effect URL's JSON has nothing at {pointer:?}"))?;
    Amount::of(found)
        .ok_or_else(|| format!("what the effect URL has at {pointer:?} is no number, and no list"))
}

async fn run(command: &str, timeout: Duration) -> Result<Amount, String> {
    let output = shell::run(command, true, timeout).await;
    let output = output.map_err(|why| format!("the effect command {why}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim().lines().last().unwrap_or_default();
        return Err(format!("the effect command failed ({}): {said}", output.status));
    }
    Amount::find(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| "there is no number in the output of the effect command".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_as_they_are_written() {
        for (text, shown) in [
            ("9900\n", "9900"),
            ("balance=99.50 EUR", "99.5"),
            ("-3", "-3"),
            ("pay-100", "100"),
            ("x = -0.000000001", "-0.000000001"),
            ("12 orders.csv", "12"),
            ("653247040368672768", "653247040368672768"),
            ("7. ", "7"),
        ] {
            assert_eq!(
                Amount::find(text).map(|amount| amount.to_string()).as_deref(),
                Some(shown),
                "{text:?}"
            );
        }
        assert_eq!(Amount::find("none"), None);
    }

    #[test]
    fn steps_are_counted_exactly() {
        let amount = |text| Amount::find(text).unwrap();
        let step = amount("9900").since(amount("10000"));
        assert_eq!(amount("9700").since(amount("10000")).count(step), Some(3));
        assert_eq!(amount("9750").since(amount("10000")).count(step), None);
        assert_eq!(amount("0.3").count(amount("0.1")), Some(3));
        assert_eq!(amount("5").count(amount("0")), None);
    }

    #[test]
    fn a_pointer_leads_to_a_number_a_text_or_a_list() {
        let body = br#"{"a":{"b":"99.5"},"list":[1,2,3],"n":-4,"o":{}}"#;
        let at = |pointer| from_body(body, Some(pointer)).map(|amount| amount.to_string());
        assert_eq!(at("/a/b").as_deref(), Ok("99.5"));
        assert_eq!(at("/list").as_deref(), Ok("3"));
        assert_eq!(at("/n").as_deref(), Ok("-4"));
        assert!(at("/o").unwrap_err().contains("no number"));
        assert!(at("/x").unwrap_err().contains("nothing at"));
        assert!(from_body(b"<html>", Some("/x")).unwrap_err().contains("not JSON"));
    }

    #[tokio::test]
    async fn a_command_that_fails_says_why() {
        let time = Duration::from_secs(30);
        assert_eq!(run("echo 42", time).await.map(|n| n.to_string()).as_deref(), Ok("42"));
        assert!(run("echo no >&2; exit 3", time).await.unwrap_err().contains("no"));
        assert!(run("echo none", time).await.unwrap_err().contains("no number"));
        assert!(run("sleep 60", Duration::from_millis(50)).await.unwrap_err().contains("did not end"));
    }
}
