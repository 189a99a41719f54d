//! `drill.sh` writes what the mission asks for, to the letter.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

#[test]
fn the_drill_writes_exactly_these_lines() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("the evidence");
    let drill = Path::new(env!("CARGO_MANIFEST_DIR")).join("drill.sh");
    let output = Command::new(&drill)
        .arg(&out)
        .env("PAY", env!("CARGO_BIN_EXE_pay"))
        .current_dir("/")
        .output()
        .expect("bash");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {said}", output.status);
    let read = |name: &str| {
        std::fs::read_to_string(out.join(name)).unwrap_or_else(|e| panic!("{name}: {e}: {said}"))
    };
    assert_eq!(read("double.out"), "balance_before=10000 balance_after=9800\n");
    assert_eq!(read("dedup.out"), "balance_after=9900 calls=2\n");
    assert_eq!(read("concurrent.out"), "processed=1 balance_delta=100\n");
    assert_eq!(read("mismatch.out"), "status=422\n");
    let ttl = read("ttl.txt");
    let ttl: u64 =
        ttl.strip_prefix("ttl=").and_then(|t| t.strip_suffix('\n')).expect("ttl=N").parse().expect("seconds");
    assert!((1..=86_400).contains(&ttl), "{ttl}");
}

#[test]
fn wrong_use_is_told() {
    let drill = Path::new(env!("CARGO_MANIFEST_DIR")).join("drill.sh");
    let output = Command::new(&drill).output().expect("bash");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("usage: "));
}
