//! The receiver of order messages in `examples/receiver`: its scripts do what their users are told, and its documents tell
//! what the scripts show.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/receiver")
}

/// Runs a script of the example from a folder that is not its own.
fn script(name: &str, args: &[&OsStr]) -> Output {
    Command::new(example().join(name))
        .args(args)
        .env("ONLYONCE", env!("CARGO_BIN_EXE_onlyonce"))
        .current_dir("/")
        .output()
        .expect("the script starts")
}

fn succeeds(name: &str, args: &[&OsStr]) -> String {
    let output = script(name, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}: {stderr}", output.status);
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn sqlite3(db: &Path, sql: &str) -> String {
    let output = Command::new("sqlite3").arg(db).arg(sql).output().expect("the sqlite3 shell");
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").trim_end().to_owned()
}

/// A message as the folder has it.
struct Message {
    path: String,
    bytes: Vec<u8>,
    body: serde_json::Value,
}

fn messages() -> Vec<Message> {
    let folder = std::fs::read_dir(example().join("messages")).expect("the folder");
    let mut files: Vec<_> = folder.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    let read = |file: &PathBuf| {
        let bytes = std::fs::read(file).expect("a message");
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        let name = file.file_name().and_then(OsStr::to_str).expect("a name");
        Message {
            path: name.split('.').nth(1).expect("NNN.PATH.MSGID.json").to_owned(),
            body: serde_json::from_slice(text).unwrap_or_else(|e| panic!("{name}: {e}")),
            bytes,
        }
    };
    files.iter().map(read).collect()
}

fn id(message: &Message) -> String {
    message.body["msg_id"].as_str().expect("msg_id").to_owned()
}

/// What a plain reading of the folder says must come out.
struct Expected {
    distinct: usize,
    duplicates: usize,
    ignored: BTreeSet<String>,
    /// Path to its duplicates and the conflicts among them.
    by_path: BTreeMap<String, (usize, usize)>,
}

fn expected(messages: &[Message]) -> Expected {
    let mut first: BTreeMap<String, &serde_json::Value> = BTreeMap::new();
    let mut expected =
        Expected { distinct: 0, duplicates: 0, ignored: BTreeSet::new(), by_path: BTreeMap::new() };
    for message in messages {
        let known = *first.entry(id(message)).or_insert(&message.body);
        if std::ptr::eq(known, &raw const message.body) {
            continue;
        }
        expected.ignored.insert(id(message));
        expected.duplicates += 1;
        let (duplicates, conflicts) = expected.by_path.entry(message.path.clone()).or_default();
        *duplicates += 1;
        *conflicts += usize::from(*known != message.body);
    }
    expected.distinct = first.len();
    expected
}

#[test]
fn the_folder_is_what_such_a_receiver_gets() {
    let messages = messages();
    assert!(messages.len() >= 200, "{}", messages.len());
    let count = |what: &dyn Fn(&Message) -> bool| messages.iter().filter(|m| what(m)).count();
    assert!(count(&|m| m.bytes.starts_with(b"\xef\xbb\xbf")) >= 5, "byte order marks");
    assert!(count(&|m| m.bytes.contains(&b'\r')) >= 3, "CRLF, and nobody converted it");
    assert!(count(&|m| m.bytes.iter().filter(|b| **b == b'\n').count() > 3) >= 10, "pretty-printed");
    let korean = |m: &Message| m.body.to_string().chars().any(|c| ('가'..='힣').contains(&c));
    assert!(count(&korean) >= 100, "Korean text");
    let kinds = |order: &serde_json::Value| {
        messages.iter().filter(|m| &m.body["order_no"] == order).map(id).collect::<BTreeSet<_>>().len()
    };
    assert!(
        count(&|m| m.body["msg_type"] == "MODIFY" && kinds(&m.body["order_no"]) >= 2) >= 30,
        "modifications"
    );
    let dates = |number: &serde_json::Value| {
        messages
            .iter()
            .filter(|m| &m.body["msg_no"] == number)
            .map(|m| m.body["sent_date"].to_string())
            .collect::<BTreeSet<_>>()
            .len()
    };
    assert!(count(&|m| dates(&m.body["msg_no"]) >= 5) >= 100, "numbers that begin anew each day");
    let by_path = expected(&messages).by_path;
    assert_eq!(by_path.keys().map(String::as_str).collect::<Vec<_>>(), ["batch", "manual", "queue", "retry"]);
}

#[test]
fn a_week_of_messages_one_by_one_and_in_bulk() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("a week");
    let printed = succeeds("run.sh", &[out.as_os_str()]);
    let messages = messages();
    let expected = expected(&messages);
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));

    let columns = "SELECT group_concat(name) FROM pragma_table_info('inbox_log')";
    let unique = "SELECT \"notnull\" FROM pragma_table_info('inbox_log') WHERE name = 'msg_id' AND pk = 1";
    for db in ["idem.db", "bulk.db"] {
        let db = out.join(db);
        assert_eq!(sqlite3(&db, columns), "msg_id,biz_key,status,response,created_at");
        assert_eq!(sqlite3(&db, unique), "1", "the primary key, and NOT NULL");
        let rows = sqlite3(&db, "SELECT count(*), count(DISTINCT msg_id) FROM inbox_log");
        assert_eq!(rows, format!("{0}|{0}", expected.distinct));
    }
    let ignored: Vec<String> = read("dup.txt").lines().map(str::to_owned).collect();
    assert_eq!(
        ignored,
        expected.ignored.iter().cloned().collect::<Vec<_>>(),
        "each once, ascending by bytes"
    );
    let counts = format!(
        "files={} applied={} duplicates={} conflicts={} failed=0 rows={}",
        messages.len(),
        expected.distinct,
        expected.duplicates,
        expected.by_path.values().map(|(_, conflicts)| conflicts).sum::<usize>(),
        expected.distinct
    );
    assert!(printed.contains(&counts), "{counts}: {printed}");
    let one_by_one = format!(
        "applied={} duplicates={} distinct={}",
        expected.distinct,
        expected.duplicates,
        ignored.len()
    );
    assert!(printed.contains(&one_by_one), "{one_by_one}: {printed}");
    let agree =
        format!("idem.db and bulk.db agree: {} rows, {} deliveries", expected.distinct, messages.len());
    assert!(printed.contains(&agree), "{agree}: {printed}");

    assert_eq!(read("race.txt").lines().last(), Some("rows=1"));
    let replay = read("replay.txt");
    assert_eq!(replay.lines().last(), Some("replay=identical"));
    let answers: BTreeSet<&str> =
        replay.lines().filter_map(|line| line.split_once(": duplicate ")).map(|(_, answer)| answer).collect();
    assert_eq!(answers.len(), 1, "{replay}");

    told_in_the_report(&expected);
    for line in read("keys.txt").lines().map(str::trim_start) {
        let (key, counts) = line.split_once(": ").expect("key: counts");
        let rows = counts.rsplit_once("rows=").expect("rows=").1;
        let row = format!("| `{key}` | {rows} |");
        assert!(document("key.md").contains(&row), "key.md says what was kept: {row}");
    }
}

fn document(name: &str) -> String {
    std::fs::read_to_string(example().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn told_in_the_report(expected: &Expected) {
    let report = document("report.md");
    for (korean, path) in [("재시도", "retry"), ("큐", "queue"), ("수동", "manual"), ("배치", "batch")]
    {
        let (duplicates, conflicts) = expected.by_path[path];
        let row = format!("| {korean} {path} | {duplicates} | {conflicts} |");
        assert!(report.contains(&row), "{row}");
        assert!(report.contains(&format!("## {korean}: ")), "a chapter for {path}");
    }
    let figures =
        format!("**{} were duplicates** of {} messages", expected.duplicates, expected.ignored.len());
    assert!(report.contains(&figures), "{figures}");
    for word in ["멱등키", "보관", "수정", "order_no", "msg_no"] {
        assert!(document("key.md").contains(word), "{word}");
    }
}

#[test]
fn the_thin_scripts_keep_the_contract() {
    let folder = TempDir::new().expect("a folder");
    let db = folder.path().join("my inbox.db");
    let json = folder.path().join("my message.json");
    std::fs::write(&json, r#"{"msg_id":"M-1","order_no":"O-1","수량":1}"#).expect("a file");
    let args = [db.as_os_str(), json.as_os_str()];
    let first = succeeds("apply.sh", &args);
    let (verdict, response) = first.split_once('\n').expect("two lines");
    assert_eq!(verdict, "applied");
    for _ in 0..2 {
        assert_eq!(succeeds("apply.sh", &args), format!("duplicate\n{response}"));
    }
    assert_eq!(
        sqlite3(&db, "SELECT msg_id, biz_key, status, response FROM inbox_log"),
        format!("M-1|O-1|done|{}", response.trim_end())
    );

    let fresh = folder.path().join("race.db");
    let race = succeeds("race.sh", &[fresh.as_os_str(), json.as_os_str()]);
    assert_eq!(race.lines().last(), Some("rows=1"));
    assert_eq!(sqlite3(&fresh, "SELECT count(*) FROM inbox_log"), "1");

    sqlite3(
        &db,
        "INSERT INTO inbox_log SELECT 'old', NULL, 'done', '{}', datetime('now', '-31 days');
         INSERT INTO inbox_log SELECT 'young', NULL, 'done', '{}', datetime('now', '-29 days');",
    );
    let purged = succeeds("purge.sh", &[db.as_os_str(), OsStr::new("30")]);
    assert_eq!(purged.lines().last(), Some("deleted=1 remain=2"));
    assert_eq!(
        sqlite3(&db, "SELECT group_concat(msg_id) FROM (SELECT msg_id FROM inbox_log ORDER BY 1)"),
        "M-1,young"
    );
}

#[test]
fn wrong_use_is_told() {
    let folder = TempDir::new().expect("a folder");
    for name in ["apply.sh", "race.sh", "purge.sh", "run.sh"] {
        let output = script(name, &[]);
        assert_eq!(output.status.code(), Some(2), "{name}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage: "), "{name}");
    }
    let db = folder.path().join("inbox.db");
    let absent = folder.path().join("absent.json");
    let output = script("apply.sh", &[db.as_os_str(), absent.as_os_str()]);
    assert_eq!(output.status.code(), Some(74));
    assert!(String::from_utf8_lossy(&output.stderr).contains("absent.json"));
    // An earlier run is not mixed with a new one.
    std::fs::write(folder.path().join("idem.db"), "").expect("a file");
    let output = script("run.sh", &[folder.path().as_os_str()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("give an empty folder"));
}
