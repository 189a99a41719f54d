//! The body of a charge: parsed once, refused with the reason.

use onlyonce::fingerprint::{Document, JsonError, Node, Pointer};

/// The most that one charge may be. Numbers in Redis's scripts are exact up to 2^53, well above.
pub(crate) const AMOUNT_MAX: u64 = 999_999_999_999;

/// An amount that can be charged: 1 to [`AMOUNT_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amount(u64);

/// Why a body is no charge.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BadCharge {
    NotJson(JsonError),
    NotAnObject,
    NoAmount,
    NotANumber,
    NotWhole(String),
    OutOfRange(String),
}

impl Amount {
    /// Reads `{"amount":100}`. Other members are the caller's business.
    pub(crate) fn read(body: &[u8]) -> Result<Self, BadCharge> {
        let document = Document::parse(body).map_err(BadCharge::NotJson)?;
        if document.root() != Node::Object {
            return Err(BadCharge::NotAnObject);
        }
        let amount = Pointer::to_member("amount").expect("a plain name");
        match document.find(&amount).ok_or(BadCharge::NoAmount)?.node {
            Node::Number(numeral) => Self::from_numeral(numeral),
            _ => Err(BadCharge::NotANumber),
        }
    }

    /// By its digits, never through a floating-point number: 100.0 and 1e2 may be a client's rounding of something else.
    fn from_numeral(numeral: &str) -> Result<Self, BadCharge> {
        let shown = || numeral.chars().take(40).collect::<String>();
        let digits = numeral.strip_prefix('-').unwrap_or(numeral);
        if !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(BadCharge::NotWhole(shown()));
        }
        match numeral.parse() {
            Ok(amount @ 1..=AMOUNT_MAX) => Ok(Self(amount)),
            _ => Err(BadCharge::OutOfRange(shown())),
        }
    }

    pub(crate) fn get(self) -> u64 {
        self.0
    }
}

impl std::fmt::Display for BadCharge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotJson(error) => {
                write!(f, "the body is no JSON: {error}, expected {}", error.expected())
            }
            Self::NotAnObject => f.write_str("the body is no JSON object such as {\"amount\":100}"),
            Self::NoAmount => f.write_str("the body has no member \"amount\""),
            Self::NotANumber => f.write_str("\"amount\" is no number"),
            Self::NotWhole(numeral) => {
                write!(f, "\"amount\" is {numeral}: write a whole number, in digits alone")
            }
            Self::OutOfRange(numeral) => {
                write!(f, "\"amount\" is {numeral}: it must be from 1 to {AMOUNT_MAX}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<u64, String> {
        Amount::read(body.as_bytes()).map(Amount::get).map_err(|why| why.to_string())
    }

    #[test]
    fn whole_amounts_are_read() {
        assert_eq!(read(r#"{"amount":100}"#), Ok(100));
        assert_eq!(read(" {\n\t\"memo\": \"x\", \"amount\" : 1 } "), Ok(1));
        assert_eq!(read(r#"{"\u0061mount":7}"#), Ok(7), "an escaped name is the same name");
        assert_eq!(read(&format!("{{\"amount\":{AMOUNT_MAX}}}")), Ok(AMOUNT_MAX));
    }

    #[test]
    fn everything_else_is_refused_with_the_reason() {
        for (body, why) in [
            ("", "no JSON"),
            ("{", "no JSON"),
            ("amount=100", "no JSON"),
            (r#"{"amount":100}}"#, "expected the end"),
            (r#"{"amount":100,"amount":1}"#, "expected each member once"),
            (r#"{"amount":100,"m":{"a":1,"a":1}}"#, "expected each member once"),
            ("[100]", "no JSON object"),
            ("100", "no JSON object"),
            ("null", "no JSON object"),
            ("{}", "no member"),
            (r#"{"Amount":100}"#, "no member"),
            (r#"{"amount":"100"}"#, "no number"),
            (r#"{"amount":null}"#, "no number"),
            (r#"{"amount":[100]}"#, "no number"),
            (r#"{"amount":true}"#, "no number"),
            (r#"{"amount":0}"#, "from 1 to"),
            (r#"{"amount":-0}"#, "from 1 to"),
            (r#"{"amount":-1}"#, "from 1 to"),
            (r#"{"amount":1000000000000}"#, "from 1 to"),
            (r#"{"amount":99999999999999999999999999}"#, "from 1 to"),
            (r#"{"amount":0.5}"#, "whole number"),
            (r#"{"amount":100.0}"#, "whole number"),
            (r#"{"amount":1e2}"#, "whole number"),
            (r#"{"amount":1e999999999}"#, "whole number"),
            (r#"{"amount":NaN}"#, "no JSON"),
            (r#"{"amount":+1}"#, "no JSON"),
            (r#"{"amount":0100}"#, "no JSON"),
            (r#"{"amount":0x10}"#, "no JSON"),
            ("\u{feff}{\"amount\":100}", "byte order mark"),
        ] {
            let said = read(body).expect_err(body);
            assert!(said.contains(why), "{body}: {said}");
        }
        assert!(Amount::read(b"{\"amount\":1,\"x\":\"\xff\"}").is_err());
        let long = format!("{{\"amount\":{}}}", "9".repeat(100_000));
        assert!(read(&long).unwrap_err().len() < 200, "a long numeral is not repeated whole");
    }
}
