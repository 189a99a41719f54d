//! No case is written and then forgotten in the macros.

use std::path::Path;

#[test]
fn every_case_is_in_the_list() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let list = std::fs::read_to_string(src.join("lib.rs")).unwrap();
    let listed: Vec<&str> = list.lines().map(str::trim).collect();
    let mut cases = 0;
    for file in std::fs::read_dir(src.join("cases")).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        for line in text.lines() {
            let Some(rest) = line.strip_prefix("pub async fn ") else { continue };
            let (name, _) = rest.split_once('(').unwrap();
            assert!(listed.contains(&name), "{name} of {} is in no list", path.display());
            cases += 1;
        }
    }
    assert!(cases > 50, "only {cases} cases found: has the layout changed?");
}
