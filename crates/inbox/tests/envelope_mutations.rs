//! The fuzz target's properties on mutated messages: bounded, the same ones in every run.

use std::fs;
use std::path::Path;

#[path = "../../../fuzz/properties/envelope.rs"]
mod properties;

const ROUNDS: usize = 40_000;

/// Pieces that change what a text means.
const PIECES: &[&[u8]] = &[
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
    "\u{202e}".as_bytes(),
    "한".as_bytes(),
];

/// xorshift64*: the same on every machine.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end.max(1)
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/envelope");
    let mut paths: Vec<_> =
        fs::read_dir(&folder).expect("the corpus").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let seeds: Vec<_> = paths.iter().map(|path| fs::read(path).expect("a seed")).collect();
    assert!(seeds.len() >= 10, "only {} seeds in {}", seeds.len(), folder.display());
    seeds
}

fn mutate(text: &mut Vec<u8>, dice: &mut Dice, seeds: &[Vec<u8>]) {
    let at = dice.below(text.len() + 1);
    match dice.below(6) {
        0 if at < text.len() => text[at] ^= 1 << dice.below(8),
        1 if at < text.len() => drop(text.remove(at)),
        2 => {
            let end = (at + dice.below(20)).min(text.len());
            let piece = text[at..end].to_vec();
            text.splice(at..at, piece);
        }
        3 => {
            let other = &seeds[dice.below(seeds.len())];
            let from = dice.below(other.len() + 1);
            text.truncate(at);
            text.extend_from_slice(&other[from..]);
        }
        4 => text.truncate(at),
        _ => drop(text.splice(at..at, PIECES[dice.below(PIECES.len())].iter().copied())),
    }
}

#[test]
fn mutated_messages_are_read_or_refused_as_they_must() {
    let seeds = seeds();
    seeds.iter().for_each(|seed| properties::check(seed));
    let mut dice = Dice(0x0b5e_55ed);
    for round in 0..ROUNDS {
        let mut text = seeds[round % seeds.len()].clone();
        for _ in 0..=dice.below(6) {
            mutate(&mut text, &mut dice, &seeds);
        }
        properties::check(&text);
    }
}
