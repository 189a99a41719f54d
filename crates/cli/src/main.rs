//! The command-line program `onlyonce`.

fn main() {}
