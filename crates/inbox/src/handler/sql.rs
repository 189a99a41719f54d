//! Statements of SQL, in the transaction that records the message.

use std::path::{Path, PathBuf};

use onlyonce_core::fingerprint::{Document, Found, Node, Pointer};
use onlyonce_store_sqlite::rusqlite::types::Value;
use onlyonce_store_sqlite::rusqlite::{self, Connection, ErrorCode, Statement};

use super::response::{self, RESPONSE_BYTES_MAX};
use crate::envelope;
use crate::error::{BadData, InboxError};
use crate::receive::Incoming;
use crate::table;
use crate::work::{Ending, TransactionWork};

/// Digits that a REAL of SQLite keeps in any case.
const REAL_DIGITS: usize = 15;
/// Statements that would end the transaction, leave it, or act on the connection.
const REFUSED: [&str; 11] = [
    "BEGIN",
    "COMMIT",
    "END",
    "ROLLBACK",
    "SAVEPOINT",
    "RELEASE",
    "ATTACH",
    "DETACH",
    "VACUUM",
    "PRAGMA",
    "EXPLAIN",
];

/// Runs statements with named parameters: `:msg_id` (the key), `:biz_key`, `:message` (its text), `:via`, `:source`, and any
/// other name for the member of that name.
///
/// The response is the value that the last statement with a result gives in its first row, or the default where none has
/// one. Whole numbers are bound as INTEGER, others as REAL, and as text where neither holds them exactly.
#[derive(Clone, Debug)]
pub struct Sql {
    path: PathBuf,
    statements: Vec<String>,
}

impl Sql {
    /// Reads the statements of a file.
    ///
    /// # Errors
    /// When it cannot be read, holds no statement, or one that has no place in a transaction.
    pub fn read(path: &Path) -> Result<Self, InboxError> {
        let text = std::fs::read(path).map_err(|error| InboxError::file(path, "cannot be read", error))?;
        let text = String::from_utf8(text).map_err(|_| unfit(path, "it is not UTF-8"))?;
        Self::new(path, &text)
    }

    /// The statements of a text; `path` is for errors.
    ///
    /// # Errors
    /// As for [`Sql::read`].
    pub fn new(path: impl Into<PathBuf>, text: &str) -> Result<Self, InboxError> {
        let path = path.into();
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let statements = split(text);
        if statements.is_empty() {
            return Err(unfit(&path, "it holds no statement"));
        }
        for statement in &statements {
            let word = first_words(statement).into_iter().next().unwrap_or_default();
            if REFUSED.contains(&word.as_str()) {
                return Err(unfit(
                    &path,
                    format!(
                        "{word} has no place in it: all of it runs in the one transaction that records the message"
                    ),
                ));
            }
        }
        Ok(Self { path, statements })
    }

    fn execute(
        &self,
        conn: &Connection,
        message: &Incoming<'_>,
        document: &Document<'_>,
    ) -> Result<Option<Vec<u8>>, InboxError> {
        let mut response = None;
        for text in &self.statements {
            let mut statement = conn.prepare_cached(text).map_err(|error| self.failed(message, error))?;
            for index in 1..=statement.parameter_count() {
                let value = self.value(&statement, index, message, document)?;
                statement.raw_bind_parameter(index, value).map_err(|error| self.failed(message, error))?;
            }
            let columns = statement.column_count();
            if columns > 1 {
                return Err(self.unfit(format!(
                    "a statement gives {columns} columns, and the response is one value: make it one, by json_object(…) for example"
                )));
            }
            let mut rows = statement.raw_query();
            let (mut first, mut is_first) = (None, true);
            while let Some(row) = rows.next().map_err(|error| self.failed(message, error))? {
                if std::mem::take(&mut is_first) && columns == 1 {
                    first = Some(table::bytes(row, 0).map_err(|error| self.failed(message, error))?);
                }
            }
            drop(rows);
            statement.clear_bindings();
            if let Some(value) = first {
                response = Some(value.unwrap_or_else(|| b"null".to_vec()));
            }
            if conn.is_autocommit() {
                return Err(self.unfit("a statement ended the transaction; nothing of it is kept"));
            }
        }
        Ok(response)
    }

    fn value(
        &self,
        statement: &Statement<'_>,
        index: usize,
        message: &Incoming<'_>,
        document: &Document<'_>,
    ) -> Result<Value, InboxError> {
        let name = statement
            .parameter_name(index)
            .and_then(|name| name.get(1..))
            .filter(|_| statement.parameter_name(index).is_some_and(|name| !name.starts_with('?')));
        let Some(name) = name else {
            return Err(self.unfit("a parameter has no name: write :msg_id and the like in place of ?"));
        };
        Ok(match name {
            "msg_id" => Value::Text(message.envelope.key.as_str().into()),
            "biz_key" => message.envelope.biz_key.clone().map_or(Value::Null, Value::Text),
            "message" => {
                Value::Text(String::from_utf8_lossy(envelope::without_bom(message.body)).into_owned())
            }
            "via" => Value::Text(message.via.as_str().into()),
            "source" => Value::Text(message.source.into()),
            name => member(name, message, document)?,
        })
    }

    // What the table's constraints refuse is of this message; a statement that cannot run fails for all of them.
    fn failed(&self, message: &Incoming<'_>, error: rusqlite::Error) -> InboxError {
        match error.sqlite_error_code() {
            Some(
                ErrorCode::ConstraintViolation
                | ErrorCode::TypeMismatch
                | ErrorCode::TooBig
                | ErrorCode::ParameterOutOfRange,
            ) => InboxError::Refused {
                source_name: message.source.into(),
                path: self.path.clone(),
                reason: error.to_string(),
            },
            Some(ErrorCode::Unknown) | None => self.unfit(error.to_string()),
            _ => InboxError::Statement { path: self.path.clone(), source: error },
        }
    }

    fn unfit(&self, reason: impl Into<String>) -> InboxError {
        unfit(&self.path, reason)
    }
}

impl TransactionWork for Sql {
    fn run(&self, conn: &Connection, message: &Incoming<'_>) -> Result<Ending, InboxError> {
        let body = envelope::without_bom(message.body);
        let document = Document::parse(body).map_err(|error| BadData {
            source_name: message.source.into(),
            line: 1,
            column: 1,
            reason: error.to_string(),
        })?;
        let response = self.execute(conn, message, &document)?;
        Ok(Ending::Done(match response {
            None => message.envelope.default_response(),
            Some(value) if value.len() > RESPONSE_BYTES_MAX => response::omitted(message.envelope),
            Some(value) => response::line(&value),
        }))
    }
}

fn member(name: &str, message: &Incoming<'_>, document: &Document<'_>) -> Result<Value, InboxError> {
    let bad = |found: &str| {
        InboxError::from(BadData {
            source_name: message.source.into(),
            line: 1,
            column: 1,
            reason: format!(
                "expected a string, a number, true, false or null for the parameter :{name}, found {found}; where it may be missing or is \
                 nested, write json_extract(:message, '$.{name}')"
            ),
        })
    };
    let found = Pointer::to_member(name).ok().and_then(|pointer| document.find(&pointer));
    let Some(Found { node, .. }) = found else { return Err(bad("no such member")) };
    Ok(match node {
        Node::String(text) => Value::Text(text.into()),
        Node::Number(numeral) => number(numeral),
        Node::Bool(value) => Value::Integer(value.into()),
        Node::Null => Value::Null,
        Node::Array => return Err(bad("an array")),
        Node::Object => return Err(bad("an object")),
    })
}

// No digit is lost: what neither type holds stays text.
fn number(numeral: &str) -> Value {
    if let Ok(whole) = numeral.parse::<i64>() {
        return Value::Integer(whole);
    }
    let mantissa = numeral.split(['e', 'E']).next().unwrap_or_default();
    let digits = mantissa.chars().filter(char::is_ascii_digit).collect::<String>();
    let significant = digits.trim_matches('0').len();
    match numeral.parse::<f64>() {
        Ok(real) if significant <= REAL_DIGITS && real.is_finite() && (real != 0.0 || significant == 0) => {
            Value::Real(real)
        }
        _ => Value::Text(numeral.into()),
    }
}

fn unfit(path: &Path, reason: impl Into<String>) -> InboxError {
    InboxError::Unfit { path: path.into(), reason: reason.into() }
}

// At each semicolon that stands by itself: not in quotes, in a comment, or in the body of a trigger.
fn split(text: &str) -> Vec<String> {
    let (mut statements, mut start) = (Vec::new(), 0);
    let mut tokens = Tokens { text, at: 0 };
    let mut words: Vec<String> = Vec::new();
    while let Some((token, end)) = tokens.next() {
        if token == ";" {
            let is_trigger = words.first().is_some_and(|word| word == "CREATE")
                && words.iter().take(3).any(|word| word == "TRIGGER");
            if !is_trigger || words.last().is_some_and(|word| word == "END") {
                push(&mut statements, &text[start..end], &mut words);
                start = end;
            }
        } else {
            words.push(token.to_ascii_uppercase());
        }
    }
    push(&mut statements, &text[start..], &mut words);
    statements
}

fn push(statements: &mut Vec<String>, text: &str, words: &mut Vec<String>) {
    if !words.is_empty() {
        statements.push(text.trim().to_owned());
    }
    words.clear();
}

fn first_words(statement: &str) -> Vec<String> {
    let mut tokens = Tokens { text: statement, at: 0 };
    std::iter::from_fn(|| tokens.next()).take(1).map(|(token, _)| token.to_ascii_uppercase()).collect()
}

/// Words, quoted texts and single characters; spaces and comments are left out.
struct Tokens<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Tokens<'t> {
    // The token, and where it ends.
    fn next(&mut self) -> Option<(&'t str, usize)> {
        loop {
            let rest = &self.text[self.at..];
            let first = rest.chars().next()?;
            let until = |end: &str, from: usize| {
                rest.get(from..)
                    .and_then(|after| after.find(end))
                    .map_or(rest.len(), |at| from + at + end.len())
            };
            let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
            let (length, is_token) = match first {
                c if c.is_whitespace() => (c.len_utf8(), false),
                '-' if rest.starts_with("--") => (until("\n", 2), false),
                '/' if rest.starts_with("/*") => (until("*/", 2), false),
                // A doubled quote is the end of one text and the start of the next.
                '\'' => (until("'", 1), true),
                '"' => (until("\"", 1), true),
                '`' => (until("`", 1), true),
                '[' => (until("]", 1), true),
                c if is_word(c) => (rest.find(|c| !is_word(c)).unwrap_or(rest.len()), true),
                c => (c.len_utf8(), true),
            };
            self.at += length;
            if is_token {
                return Some((&rest[..length], self.at));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_end_at_a_semicolon_that_stands_by_itself() {
        let text = "-- one; two\nINSERT INTO t VALUES ('a;''b', \"c;\", [d;], `e;`) /* ; */;;\n UPDATE t SET a = 1; \n-- end";
        assert_eq!(
            split(text),
            [
                "-- one; two\nINSERT INTO t VALUES ('a;''b', \"c;\", [d;], `e;`) /* ; */;",
                "UPDATE t SET a = 1;"
            ]
        );
        let trigger = "CREATE TEMP TRIGGER x AFTER INSERT ON t BEGIN SELECT 1; SELECT 2; END; SELECT 3";
        assert_eq!(split(trigger).len(), 2);
        assert!(split(" -- nothing\n /* at all").is_empty());
    }

    #[test]
    fn what_has_no_place_in_a_transaction_is_refused() {
        for text in [
            "COMMIT",
            "/* x */ commit;",
            "INSERT INTO t VALUES (1); rollback",
            "PRAGMA journal_mode = OFF",
            "",
        ] {
            assert!(matches!(Sql::new("f.sql", text), Err(InboxError::Unfit { .. })), "{text:?}");
        }
        assert!(Sql::new("f.sql", "REPLACE INTO \"commit\" VALUES ('COMMIT; x')").is_ok());
    }

    #[test]
    fn numbers_keep_every_digit() {
        assert_eq!(number("653247040368672769"), Value::Integer(653_247_040_368_672_769));
        assert_eq!(number("-7"), Value::Integer(-7));
        assert_eq!(number("10.50"), Value::Real(10.5));
        assert_eq!(number("1e3"), Value::Real(1000.0));
        for exact in ["9223372036854775808", "1e400", "0.12345678901234567", "1e-400"] {
            assert_eq!(number(exact), Value::Text(exact.into()));
        }
    }
}
