//! What was sent and what came back, for the report: readable, bounded, and without credentials.

use http::HeaderMap;

use crate::wire::{Answer, Call, NoAnswer};

const LINES_MAX: usize = 12;
const BODY_CHARS_MAX: usize = 120;
const KEY_CHARS_MAX: usize = 80;

/// The exchanges of a trial.
#[derive(Clone, Debug, Default)]
pub(crate) struct Story {
    sent: Vec<String>,
    got: Vec<String>,
    left_out: usize,
}

impl Story {
    /// A line in each column.
    pub(crate) fn add(&mut self, sent: String, got: String) {
        if self.sent.len() < LINES_MAX {
            self.sent.push(sent);
            self.got.push(got);
        } else {
            self.left_out += 1;
        }
    }

    pub(crate) fn append(&mut self, other: &Self) {
        for (sent, got) in other.sent.iter().zip(&other.got) {
            self.add(sent.clone(), got.clone());
        }
        self.left_out += other.left_out;
    }

    /// What was sent, a line each.
    pub(crate) fn sent(&self) -> String {
        self.column(&self.sent)
    }

    /// What came back, a line each.
    pub(crate) fn got(&self) -> String {
        self.column(&self.got)
    }

    fn column(&self, lines: &[String]) -> String {
        let mut text: Vec<String> =
            lines.iter().enumerate().map(|(index, line)| format!("{}. {line}", index + 1)).collect();
        if self.left_out > 0 {
            text.push(format!("… and {} more", self.left_out));
        }
        text.join("\n")
    }
}

/// A request in a line: method, target, key, body. Other headers may be credentials.
pub(crate) fn call(call: &Call, key_header: &str) -> String {
    let mut line = format!("{} {}", call.method, call.target);
    for (name, value) in call.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case(key_header)) {
        line += &format!(
            "  {name}: {}",
            shorten(&value.escape_ascii().to_string().replace("\\\"", "\""), KEY_CHARS_MAX)
        );
    }
    if !call.body.is_empty() {
        line += &format!("  {}", body(&call.body));
    }
    line
}

/// An answer in a line: status, a few headers, body.
pub(crate) fn answer(answer: &Answer) -> String {
    let mut line = answer.status.to_string();
    for name in ["location", "retry-after", "content-type"] {
        if let Some(value) = answer.headers.get(name) {
            line += &format!(
                "  {name}: {}",
                shorten(&value.as_bytes().escape_ascii().to_string(), KEY_CHARS_MAX)
            );
        }
    }
    for (name, value) in markers(&answer.headers) {
        line += &format!("  {name}: {}", shorten(&value, KEY_CHARS_MAX));
    }
    if !answer.body.is_empty() {
        line += &format!("  {}", body(&answer.body));
    }
    line
}

/// An outcome in a line.
pub(crate) fn outcome(outcome: &Result<Answer, NoAnswer>) -> String {
    match outcome {
        Ok(came) => answer(came),
        Err(why) => why.to_string(),
    }
}

/// Headers that speak of idempotency.
pub(crate) fn markers(headers: &HeaderMap) -> impl Iterator<Item = (String, String)> + '_ {
    headers
        .iter()
        .filter(|(name, _)| name.as_str().contains("idempoten") || name.as_str().contains("replay"))
        .map(|(name, value)| (name.to_string(), value.as_bytes().escape_ascii().to_string()))
}

/// A body fit for a line.
pub(crate) fn body(bytes: &[u8]) -> String {
    let shown = match std::str::from_utf8(bytes.trim_ascii_start()) {
        Ok(text) => {
            let mut start = String::new();
            for word in text.split_whitespace() {
                start += if start.is_empty() { "" } else { " " };
                start += word;
                // A long body is not read to its end for the sake of one line.
                if start.len() > 4 * BODY_CHARS_MAX {
                    break;
                }
            }
            let start = shorten(&start, BODY_CHARS_MAX + 1);
            shorten(&start.chars().flat_map(visible).collect::<String>(), BODY_CHARS_MAX)
        }
        Err(_) => {
            shorten(&bytes[..bytes.len().min(BODY_CHARS_MAX)].escape_ascii().to_string(), BODY_CHARS_MAX)
        }
    };
    if bytes.len() > BODY_CHARS_MAX { format!("{shown} ({} bytes)", bytes.len()) } else { shown }
}

// What a server says must not move the cursor of whoever reads it.
fn visible(c: char) -> Vec<char> {
    let turns =
        matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    if c.is_control() || turns { c.escape_unicode().collect() } else { vec![c] }
}

/// A text cut at `max` characters.
pub(crate) fn shorten(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_holds_no_credentials_and_no_control_characters() {
        let sent = Call {
            method: http::Method::POST,
            target: "/pay".into(),
            headers: vec![
                ("Authorization".into(), b"Bearer hush".to_vec()),
                ("Idempotency-Key".into(), b"\"a\x01\"".to_vec()),
            ],
            body: "{\n  \"amount\": 100\n}".into(),
        };
        assert_eq!(
            call(&sent, "idempotency-key"),
            r#"POST /pay  Idempotency-Key: "a\x01"  { "amount": 100 }"#
        );
        assert_eq!(body("a\u{1b}[2J\u{202e}".as_bytes()), "a\\u{1b}[2J\\u{202e}");
        assert_eq!(body(&[0xff, b'a']), "\\xffa");
        assert!(body(&[b'x'; 5000]).ends_with("… (5000 bytes)"));
    }

    #[test]
    fn a_long_story_is_cut() {
        let mut story = Story::default();
        for n in 0..20 {
            story.add(format!("s{n}"), format!("g{n}"));
        }
        assert!(story.sent().ends_with("12. s11\n… and 8 more") && story.got().starts_with("1. g0"));
    }
}
