//! What others wrote, for a terminal or a log.

/// Text from a client or a file, fit for a terminal: what cannot be seen, or turns the line around, is escaped.
pub(crate) fn visible(text: &str) -> String {
    let hidden = |c: char| c != '\\' && c != '\'' && c != '"' && c.escape_debug().count() > 1;
    let bidi = |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    text.chars()
        .map(|c| if hidden(c) || bidi(c) { c.escape_unicode().to_string() } else { c.to_string() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_seen_is_escaped_and_the_rest_is_not() {
        assert_eq!(visible("order-7 é \"x\" \\ 주문"), "order-7 é \"x\" \\ 주문");
        assert_eq!(visible("a\u{202e}b\u{200b}c\u{1b}"), "a\\u{202e}b\\u{200b}c\\u{1b}");
    }
}
