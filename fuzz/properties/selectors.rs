//! What must hold for any JSON pointers on any JSON: what they find, and what a fingerprint by them sees.

use http::HeaderMap;
use onlyonce_core::Fingerprint;
use onlyonce_core::fingerprint::{Definition, Document, JsonErrorKind, Material, NAMES_MAX, Node, Pointer};
use serde_json::Value;

use super::json::respaced;

/// Takes `POINTER\nPOINTER…\0TEXT`.
///
/// # Panics
/// When something does not hold.
pub(crate) fn check(data: &[u8]) {
    let Some(end) = data.iter().position(|byte| *byte == 0) else { return };
    let (Ok(pointers), text) = (std::str::from_utf8(&data[..end]), &data[end + 1..]) else { return };
    let pointers: Vec<&str> = pointers.split('\n').collect();
    for pointer in &pointers {
        names_a_member(pointer);
        let Ok(parsed) = pointer.parse::<Pointer>() else {
            assert!(Definition::members(&pointers).is_err());
            return;
        };
        assert_eq!((parsed.as_str(), parsed.to_string().parse().as_ref()), (*pointer, Ok(&parsed)));
        finds_what_another_finds(text, &parsed);
    }
    let (Ok(members), Ok(rest)) = (Definition::members(&pointers), Definition::all_except(&pointers)) else {
        assert!(pointers.len() > NAMES_MAX || pointers.contains(&""));
        return;
    };
    let backwards: Vec<&str> = pointers.iter().rev().chain(&pointers).copied().collect();
    assert_eq!(Definition::members(&backwards).as_ref(), Ok(&members), "order and repetition mean nothing");
    assert_ne!(members.id(), rest.id());
    for definition in [&members, &rest] {
        assert_eq!(fingerprint(definition, text).ok(), fingerprint(definition, &respaced(text)).ok());
    }
    if let Ok(value) = serde_json::from_slice::<Value>(text) {
        pointers.iter().for_each(|pointer| sees_what_is_named(&value, pointer));
    }
}

fn fingerprint(definition: &Definition, body: &[u8]) -> Result<Fingerprint, JsonErrorKind> {
    let headers = HeaderMap::new();
    let material = Material { leading: &[b"POST"], headers: &headers, body, body_is_json: true };
    definition.fingerprint(&material).map_err(|error| error.kind())
}

/// Any text as the name of a member is found under it.
fn names_a_member(name: &str) {
    let Ok(pointer) = Pointer::to_member(name) else { return };
    let text = serde_json::to_vec(&serde_json::json!({ name: 7 })).expect("it is JSON");
    let document = Document::parse(&text).expect("it is JSON");
    assert_eq!(document.find(&pointer).map(|found| found.node), Some(Node::Number("7")));
}

fn finds_what_another_finds(text: &[u8], pointer: &Pointer) {
    let (Ok(ours), Ok(theirs)) = (Document::parse(text), serde_json::from_slice::<Value>(text)) else {
        return;
    };
    match (ours.find(pointer).map(|found| found.node), theirs.pointer(pointer.as_str())) {
        (None, None)
        | (Some(Node::Null), Some(Value::Null))
        | (Some(Node::Array), Some(Value::Array(_)))
        | (Some(Node::Object), Some(Value::Object(_)))
        | (Some(Node::Number(_)), Some(Value::Number(_))) => {}
        (Some(Node::Bool(one)), Some(Value::Bool(other))) => assert_eq!(one, *other),
        (Some(Node::String(one)), Some(Value::String(other))) => assert_eq!(one, other),
        (ours, theirs) => panic!("{pointer}: {ours:?} here, {theirs:?} there"),
    }
}

/// Another value in that place is another operation to those who name it, and the same to those who leave it out.
fn sees_what_is_named(value: &Value, pointer: &str) {
    let (Ok(members), Ok(rest)) = (Definition::members([pointer]), Definition::all_except([pointer])) else {
        return;
    };
    let mut other = value.clone();
    let Some(place) = other.pointer_mut(pointer) else { return };
    *place = Value::String(format!("not {place}"));
    let texts = [value, &other].map(|value| serde_json::to_vec(value).expect("it is JSON"));
    let both = |definition: &Definition| texts.each_ref().map(|text| fingerprint(definition, text));
    if let [Ok(one), Ok(other)] = both(&members) {
        assert_ne!(one, other, "{pointer}");
    }
    if let [Ok(one), Ok(other)] = both(&rest) {
        assert_eq!(one, other, "{pointer}");
    }
}
