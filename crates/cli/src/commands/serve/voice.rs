//! What the gateway says of itself, beside the log of requests: at its start, at its end, and why there was no start.

use onlyonce_core::{Clock, SystemClock};
use serde_json::{Map, Value};

use super::log::LogFormat;
use crate::failure::Failure;

/// In the form of the log, on standard error, whatever `RUST_LOG` asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Voice {
    json: bool,
}

/// What is said once, under a name.
pub(super) type Told = (&'static str, String);

impl Voice {
    pub(super) fn of(format: LogFormat) -> Self {
        Self { json: format == LogFormat::Json }
    }

    /// What a gateway is; `hazards` are what its operator should know.
    pub(super) fn banner(self, told: &[Told], hazards: &[String]) {
        if self.json {
            let mut fields = Map::new();
            fields.insert("version".into(), env!("CARGO_PKG_VERSION").into());
            told.iter().for_each(|(name, text)| add(&mut fields, name, text));
            json("INFO", "starting", fields);
            for hazard in hazards {
                json("WARN", &format!("hazard: {hazard}"), Map::new());
            }
            return;
        }
        eprintln!("onlyonce {}", env!("CARGO_PKG_VERSION"));
        let hazards = hazards.iter().map(|hazard| ("hazard", hazard));
        for (name, text) in told.iter().map(|(name, text)| (*name, text)).chain(hazards) {
            eprintln!("  {name:<9} {text}");
        }
    }

    /// Where the operator's listener is.
    pub(super) fn admin(self, url: &str) {
        match self.json {
            true => self.say(&format!("admin on {url}")),
            false => eprintln!("  admin     {url}"),
        }
    }

    /// A sentence.
    pub(super) fn say(self, sentence: &str) {
        match self.json {
            true => json("INFO", sentence, Map::new()),
            false => eprintln!("{sentence}"),
        }
    }

    /// Why it does not start. As text, that is left to whoever ends the program.
    pub(super) fn failed(self, failure: Failure) -> Failure {
        if !self.json {
            return failure;
        }
        json("ERROR", &failure.to_string(), Map::new());
        Failure::Told(failure.code())
    }
}

// What has a name twice is a list.
fn add(fields: &mut Map<String, Value>, name: &str, text: &str) {
    match fields.get_mut(name) {
        None => drop(fields.insert(name.into(), text.into())),
        Some(Value::Array(several)) => several.push(text.into()),
        Some(one) => *one = Value::Array(vec![one.take(), text.into()]),
    }
}

// As the lines of the log: see `log`.
fn json(level: &str, message: &str, fields: Map<String, Value>) {
    let mut line = Map::new();
    let now = humantime::format_rfc3339_micros(SystemClock.wall());
    for (name, text) in [
        ("timestamp", now.to_string().as_str()),
        ("level", level),
        ("message", message),
        ("target", "onlyonce::serve"),
    ] {
        line.insert(name.into(), text.into());
    }
    line.extend(fields);
    eprintln!("{}", Value::Object(line));
}
