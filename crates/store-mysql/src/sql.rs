//! Statements with their values, and two ways to send them.

use std::fmt::Write;

use mysql_async::Value;

/// A statement with `?` for each value. Its text holds no other `?`, and no value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sql {
    text: String,
    values: Vec<Value>,
}

impl Sql {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), values: Vec::new() }
    }

    pub(crate) fn push(&mut self, text: &str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    pub(crate) fn bind(&mut self, value: impl Into<Value>) -> &mut Self {
        self.values.push(value.into());
        self
    }

    /// Adds a `?` with its value.
    pub(crate) fn value(&mut self, value: impl Into<Value>) -> &mut Self {
        self.push("?").bind(value)
    }

    /// For the server to prepare, and the values to send.
    pub(crate) fn into_parts(self) -> (String, Vec<Value>) {
        (self.text, self.values)
    }

    /// With the values written into the text. Bytes are written as hexadecimal digits, which mean the same under every
    /// character set and `sql_mode`.
    pub(crate) fn inlined(&self) -> String {
        let bytes: usize = self.values.iter().map(literal_size).sum();
        let mut text = String::with_capacity(self.text.len() + bytes);
        let mut values = self.values.iter();
        for (n, part) in self.text.split('?').enumerate() {
            if n > 0 {
                push_literal(&mut text, values.next().unwrap_or(&Value::NULL));
            }
            text.push_str(part);
        }
        debug_assert!(values.next().is_none(), "a value for each place");
        text
    }
}

/// The size of the literal of these bytes, quotes included.
pub(crate) fn hex_size(bytes: usize) -> usize {
    bytes * 2 + 3
}

fn literal_size(value: &Value) -> usize {
    match value {
        Value::Bytes(bytes) => hex_size(bytes.len()),
        _ => 20,
    }
}

fn push_literal(text: &mut String, value: &Value) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    match value {
        Value::Bytes(bytes) => {
            text.push_str("x'");
            for byte in bytes {
                text.push(char::from(HEX[usize::from(byte >> 4)]));
                text.push(char::from(HEX[usize::from(byte & 15)]));
            }
            text.push('\'');
        }
        Value::Int(number) => drop(write!(text, "{number}")),
        Value::UInt(number) => drop(write!(text, "{number}")),
        // Nothing else is ever bound.
        _ => text.push_str("NULL"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_literals() {
        let mut sql = Sql::new("SELECT ");
        sql.value("o'x?\\").push(", ").value(-7_i64).push(", ").value(u64::MAX).push(", ").value(None::<u16>);
        assert_eq!(sql.inlined(), "SELECT x'6f27783f5c', -7, 18446744073709551615, NULL");
        let (text, values) = sql.into_parts();
        assert_eq!((text.as_str(), values.len()), ("SELECT ?, ?, ?, ?", 4));
    }
}
