//! Values that may hold a password, such as a URL: a refusal does not repeat them.

use std::ffi::OsStr;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;
use clap::{Arg, Command, Error};

/// Reads a value by a function, and says what is wrong with it without it where it has an `@`.
#[derive(Clone)]
pub(crate) struct Unrepeated<F>(pub(crate) F);

impl<T, E, F> TypedValueParser for Unrepeated<F>
where
    T: Clone + Send + Sync + 'static,
    E: std::fmt::Display,
    F: Fn(&str) -> Result<T, E> + Clone + Send + Sync + 'static,
{
    type Value = T;

    fn parse_ref(&self, cmd: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, Error> {
        let name = arg.map(ToString::to_string).unwrap_or_default();
        let wrong = |shown: &str, why: &str| {
            let text = format!("invalid value {shown}for '{name}': {why}\n");
            Error::raw(ErrorKind::ValueValidation, text).with_cmd(cmd)
        };
        let Some(text) = value.to_str() else { return Err(wrong("", "it is not UTF-8")) };
        (self.0)(text).map_err(|error| {
            let why = error.to_string();
            match text.contains('@') {
                // Nor do the words of the reason, should they quote it.
                true if why.contains(text) => wrong("", "it is not a URL that can be used here"),
                true => wrong("", &why),
                false => wrong(&format!("'{text}' "), &why),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_repeated_and_the_reason_is() {
        let said = |value: &str, quotes: bool| {
            let parse = move |text: &str| -> Result<String, String> {
                Err(if quotes { format!("{text}: no") } else { "no path".into() })
            };
            let arg = Arg::new("upstream").long("upstream").value_name("URL").value_parser(Unrepeated(parse));
            let parsed = Command::new("serve").arg(arg).try_get_matches_from(["serve", "--upstream", value]);
            parsed.unwrap_err().to_string()
        };
        let plain = said("http://host/x", false);
        assert!(plain.contains("invalid value 'http://host/x' for '--upstream <URL>': no path"), "{plain}");
        for quotes in [false, true] {
            let secret = said("http://user:hunter2@host/x", quotes);
            assert!(!secret.contains("hunter2") && secret.contains("for '--upstream <URL>': "), "{secret}");
        }
    }
}
