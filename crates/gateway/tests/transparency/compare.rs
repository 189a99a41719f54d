//! What is different between two ways of one case.

use std::collections::BTreeSet;

use crate::play::Seen;
use crate::wire::{Framing, Message};

/// Each difference in words, without names of cases or values in it, so that the same difference has the same words.
pub(crate) fn differences(direct: &Seen, through: &Seen) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let refused = through.requests.len() < direct.requests.len();
    if refused {
        let answer = through.answers.last().map_or("silence".into(), |answer| match answer.code() {
            Some(code) => format!("{} `{code}`", answer.status()),
            None => answer.status().to_string(),
        });
        found.insert(format!("the request does not go on: {answer}"));
    } else if through.requests.len() > direct.requests.len() {
        found.insert("more requests arrive than were sent".into());
    }
    for (a, b) in direct.requests.iter().zip(&through.requests) {
        messages("request", a, b, &mut found);
    }
    if refused {
        return found;
    }
    if direct.unanswered != through.unanswered {
        let status = through.answers.last().map(Message::status);
        found.insert(match status {
            Some(status) if !through.unanswered => format!("silence becomes an answer: {status}"),
            _ => "an answer is missing".into(),
        });
        return found;
    }
    answers(direct, through, &mut found);
    if direct.tunnel != through.tunnel {
        found.insert("bytes in the tunnel are changed".into());
    }
    found
}

fn answers(direct: &Seen, through: &Seen, found: &mut BTreeSet<String>) {
    let is_interim = |message: &&Message| message.status() < 200 && message.status() != 101;
    let interim = |seen: &Seen| seen.answers.iter().filter(is_interim).cloned().collect::<Vec<_>>();
    let last = |seen: &Seen| seen.answers.iter().filter(|m| !is_interim(m)).cloned().collect::<Vec<_>>();
    let (a, b) = (interim(direct), interim(through));
    for status in [100, 102, 103] {
        let count = |messages: &[Message]| messages.iter().filter(|m| m.status() == status).count();
        match count(&a).cmp(&count(&b)) {
            std::cmp::Ordering::Greater => drop(found.insert(format!("interim answer {status} is missing"))),
            std::cmp::Ordering::Less => drop(found.insert(format!("interim answer {status} is added"))),
            std::cmp::Ordering::Equal => {}
        }
    }
    if a.len() == b.len() {
        a.iter().zip(&b).for_each(|(a, b)| messages("interim answer", a, b, found));
    }
    let (a, b) = (last(direct), last(through));
    if a.len() != b.len() {
        found.insert("the number of answers is another".into());
    }
    for (a, b) in a.iter().zip(&b) {
        match b.code().filter(|_| a.status() != b.status()) {
            Some(code) => drop(found.insert(format!("the reply does not go on: {} `{code}`", b.status()))),
            None => messages("reply", a, b, found),
        }
    }
}

pub(crate) fn messages(what: &str, a: &Message, b: &Message, found: &mut BTreeSet<String>) {
    let parts =
        if what == "request" { ["method", "target", "version"] } else { ["version", "status", "reason"] };
    for ((part, a), b) in parts.iter().zip(a.start_parts()).zip(b.start_parts()) {
        if a != b {
            let values = match *part {
                "status" | "version" => format!(": {a} becomes {b}"),
                _ => String::new(),
            };
            found.insert(format!("{what} {part} is changed{values}"));
        }
    }
    if a.framing != b.framing {
        found.insert(format!("{what} body: {} becomes {}", framing(a.framing), framing(b.framing)));
    }
    let framed = [a.framing, b.framing].iter().any(|f| matches!(f, Framing::Length | Framing::Chunks));
    let skip = |name: &str| framed && (name == "content-length" || name == "transfer-encoding");
    lines(&format!("{what} header"), &a.headers, &b.headers, &skip, found);
    if a.body != b.body && a.complete {
        found.insert(format!("{what} body is changed"));
    }
    if a.complete != b.complete {
        let (from, to) = if a.complete { ("whole", "cut short") } else { ("cut short", "whole") };
        found.insert(format!("{what} that was {from} is {to}"));
    }
    if !a.complete && !b.complete && !a.body.starts_with(&b.body) && !b.body.starts_with(&a.body) {
        found.insert(format!("{what} body is changed"));
    }
    if a.extensions && !b.extensions {
        found.insert(format!("{what} body: chunk extensions are missing"));
    }
    lines(&format!("{what} trailer"), &a.trailers, &b.trailers, &|_| false, found);
}

fn framing(framing: Framing) -> &'static str {
    match framing {
        Framing::None => "none",
        Framing::Length => "a length",
        Framing::Chunks => "chunks",
        Framing::Close => "all until the connection closes",
    }
}

type Lines = [(String, String)];

fn lines(what: &str, a: &Lines, b: &Lines, skip: &dyn Fn(&str) -> bool, found: &mut BTreeSet<String>) {
    let names = |lines: &Lines| {
        let mut names: Vec<String> = Vec::new();
        for (name, _) in lines {
            let name = name.to_ascii_lowercase();
            if !names.contains(&name) && !skip(&name) {
                names.push(name);
            }
        }
        names
    };
    let values = |lines: &Lines, name: &str| -> Vec<String> {
        let of_name = lines.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        // Its options are the same in any case of letters.
        of_name.map(|value| if name == "connection" { value.to_lowercase() } else { value.clone() }).collect()
    };
    let (names_a, names_b) = (names(a), names(b));
    for name in &names_a {
        let (values_a, values_b) = (values(a, name), values(b, name));
        // Many of one kind are one difference.
        let name = if name.starts_with("x-header-") { "x-header-*" } else { name };
        if values_b.is_empty() {
            found.insert(format!("{what} `{name}` is missing"));
        } else if values_a != values_b {
            let joined =
                values_a.join(", ") == values_b.join(", ") || values_a.join("; ") == values_b.join("; ");
            let how = if joined { "lines are joined" } else { "is changed" };
            found.insert(format!("{what} `{name}` {how}"));
        }
    }
    for name in names_b.iter().filter(|name| !names_a.contains(name)) {
        found.insert(format!("{what} `{name}` is added"));
    }
    let common = |of: &[String], other: &[String]| -> Vec<String> {
        of.iter().filter(|name| other.contains(name)).cloned().collect()
    };
    if common(&names_a, &names_b) != common(&names_b, &names_a) {
        found.insert(format!("{what} lines are in another order"));
    }
    let spelled = |lines: &Lines| lines.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>();
    let (spelled_a, spelled_b) = (spelled(a), spelled(b));
    let differs = |name: &&String| {
        let lower = name.to_ascii_lowercase();
        !spelled_b.contains(*name) && names_b.contains(&lower)
    };
    if spelled_a.iter().any(|name| differs(&name)) {
        found.insert(format!("{what} names are in lower case"));
    }
}
