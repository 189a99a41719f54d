//! The properties of the fuzz targets on mutated inputs: without a fuzzer, bounded, the same ones in every run. That of the
//! files of options is with their reader.

#[path = "../../../fuzz/properties/canonical_json.rs"]
mod canonical_json;
#[path = "../../../fuzz/properties/envelope.rs"]
mod envelope;
#[path = "../../../fuzz/properties/json.rs"]
mod json;
#[path = "../../../fuzz/properties/key_header.rs"]
mod key_header;
#[path = "../../../fuzz/properties/mutation.rs"]
mod mutation;
#[path = "../../../fuzz/properties/reply.rs"]
mod reply;
#[path = "../../../fuzz/properties/selectors.rs"]
mod selectors;

const ROUNDS: usize = 40_000;

/// Pieces that change what a JSON text means.
const JSON: &[&[u8]] = &[
    b"\"msg_id\"",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\"",
    b"\\",
    b"\\u",
    b"\\ud83d",
    b"\\ude00",
    b"\\u0000",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x98\x80",
    b"null",
    b"true",
    b"1e999",
    b"1e9999999999999999",
    b"-0",
    b"0.",
    b"00",
    b"\n",
    b"\r",
    b"\t",
    b"\0",
    b"{msg_id}/{/a/0}\0",
    b"/a/0",
    b"~1",
    b"~",
    "\u{202e}".as_bytes(),
    "한".as_bytes(),
];

#[test]
fn mutated_messages_are_read_or_refused_as_they_must() {
    mutation::play("envelope", JSON, ROUNDS, envelope::check);
}

#[test]
fn mutated_json_has_one_canonical_form_for_each_meaning() {
    mutation::play("canonical_json", JSON, ROUNDS, canonical_json::check);
}

#[test]
fn mutated_selectors_find_what_they_name_and_fingerprints_see_nothing_else() {
    mutation::play("selectors", JSON, ROUNDS, selectors::check);
}

#[test]
fn mutated_key_headers_are_one_key_or_none() {
    let pieces: &[&[u8]] =
        &[b"\"", b"\\", b"\\\"", b",", b";", b";a=1", b" ", b"\t", b"\x7f", b"\xe9", b"\0", &[b'k'; 254]];
    mutation::play("key_header", pieces, ROUNDS, key_header::check);
}

#[test]
fn mutated_replies_are_read_or_refused_and_survive() {
    let pieces: &[&[u8]] = &[
        b":onlyonce 1\n",
        b":onlyonce 2\n",
        b":omitted\n",
        b":trailers\n",
        b": ",
        b":",
        b"=",
        b"\n",
        b"\r",
        b"\0",
        b"x-a: 1\n",
        b"x-a=1\n",
        b"\xff",
        b"set-cookie: a=b\n",
    ];
    mutation::play("reply", pieces, ROUNDS, reply::check);
}
