//! The one line that is stored of what a handler said.

use serde::de::IgnoredAny;
use serde_json::json;

use crate::envelope::Envelope;

/// What a handler may answer, at most. The work of one that says more is done all the same: its answer is left out.
pub const RESPONSE_BYTES_MAX: usize = 1024 * 1024;

/// JSON without the spaces between its parts, every numeral and escape as it was; anything else as a string of JSON,
/// the line end at its end left out.
pub(super) fn line(output: &[u8]) -> String {
    if serde_json::from_slice::<IgnoredAny>(output).is_ok() {
        return minified(output);
    }
    let text = String::from_utf8_lossy(output);
    let text = text.strip_suffix('\n').map_or(&*text, |text| text.strip_suffix('\r').unwrap_or(text));
    serde_json::to_string(text).expect("text is JSON")
}

/// In place of an answer that is too long to keep.
pub(super) fn omitted(envelope: &Envelope) -> String {
    json!({
        "msg_id": envelope.key.as_str(),
        "biz_key": envelope.biz_key,
        "result": "applied",
        "response_omitted": format!("longer than {RESPONSE_BYTES_MAX} bytes"),
    })
    .to_string()
}

fn minified(json: &[u8]) -> String {
    let (mut kept, mut in_string, mut escaped) = (Vec::with_capacity(json.len()), false, false);
    for &byte in json {
        if in_string {
            in_string = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
        } else if byte.is_ascii_whitespace() {
            continue;
        } else {
            in_string = byte == b'"';
        }
        kept.push(byte);
    }
    String::from_utf8_lossy(&kept).into_owned()
}

#[cfg(test)]
mod tests {
    use super::line;

    #[test]
    fn json_is_minified_and_all_else_is_a_string() {
        for (output, stored) in [
            (
                "{ \"a\" : 1.50,\r\n\t\"b\": [ 653247040368672768, 1E400, -0 ] }\n",
                r#"{"a":1.50,"b":[653247040368672768,1E400,-0]}"#,
            ),
            (r#"{"a b":" \" \\","c":"\u00e9 é"}"#, r#"{"a b":" \" \\","c":"\u00e9 é"}"#),
            (" \"x  y\" ", r#""x  y""#),
            ("17\n", "17"),
            ("ok\n", r#""ok""#),
            ("ok\r\n", r#""ok""#),
            ("two\nlines\n\n", r#""two\nlines\n""#),
            ("", r#""""#),
            ("{\"a\":1} trailing", r#""{\"a\":1} trailing""#),
            ("{\"a\":1}{\"b\":2}", r#""{\"a\":1}{\"b\":2}""#),
        ] {
            assert_eq!(line(output.as_bytes()), stored, "{output:?}");
        }
        assert_eq!(line(b"\xff"), "\"\u{fffd}\"");
    }
}
