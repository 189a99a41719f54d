//! Inputs made from those of a corpus by mutation: bounded, and the same ones in every run. For the tests in the tree, which
//! play the properties of the fuzz targets without a fuzzer.

use std::fs;
use std::path::Path;

/// Checks each input of the corpus of this target, and `rounds` mutated ones, in which `pieces` turn up.
///
/// # Panics
/// When something does not hold, with the input.
pub(crate) fn play(target: &str, pieces: &[&[u8]], rounds: usize, check: impl Fn(&[u8])) {
    let seeds = corpus(target);
    let checked = |input: &[u8]| {
        let told = Told(input);
        check(input);
        std::mem::forget(told);
    };
    seeds.iter().for_each(|seed| checked(seed));
    let mut dice = Dice(0x0b5e_55ed);
    for round in 0..rounds {
        let mut input = seeds[round % seeds.len()].clone();
        for _ in 0..=dice.below(6) {
            mutate(&mut input, &mut dice, &seeds, pieces);
        }
        checked(&input);
    }
}

/// Says which input it was, when a check panics.
struct Told<'a>(&'a [u8]);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        eprintln!("with the input b\"{}\"", self.0.escape_ascii());
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut paths: Vec<_> =
        fs::read_dir(&folder).expect("the corpus").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let seeds: Vec<_> = paths.iter().map(|path| fs::read(path).expect("a seed")).collect();
    assert!(seeds.len() >= 10, "only {} seeds in {}", seeds.len(), folder.display());
    seeds
}

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

fn mutate(text: &mut Vec<u8>, dice: &mut Dice, seeds: &[Vec<u8>], pieces: &[&[u8]]) {
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
        _ => drop(text.splice(at..at, pieces[dice.below(pieces.len())].iter().copied())),
    }
}
