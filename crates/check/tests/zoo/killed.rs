//! A server of the zoo as a process, so that it can be killed in mid-request and started again.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use testkit::{Client, Process, RawConnection, free_addr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::defect::Defect;
use crate::nature::{Breed, Nature};
use crate::serve::Server;
use crate::shop::Shop;

const NATURE: &str = "ONLYONCE_ZOO_NATURE";
const ADDR: &str = "ONLYONCE_ZOO_ADDR";
const JOURNAL: &str = "ONLYONCE_ZOO_JOURNAL";
const BODY: &str = r#"{"amount":100}"#;
const SLOW: &str = r#"{"amount":100,"slow":1500}"#;

/// A server in a process of its own, and what starts it again.
#[derive(Debug)]
pub(crate) struct Killable {
    pub(crate) addr: SocketAddr,
    /// Who asks here has the server killed and started again: see [`Self::restart_command`].
    control: SocketAddr,
    listening: JoinHandle<()>,
}

#[derive(Debug)]
struct Life {
    nature: Nature,
    addr: SocketAddr,
    folder: TempDir,
    process: Process,
}

impl Killable {
    /// Starts one.
    pub(crate) async fn start(nature: impl Into<Nature>) -> Self {
        let (nature, folder) = (nature.into(), tempfile::tempdir().unwrap());
        let addr = free_addr();
        let process = spawn(nature, folder.path(), addr).await;
        let life = Life { nature, addr, folder, process };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = listener.local_addr().unwrap();
        let listening = tokio::spawn(obey(listener, life));
        Self { addr, control, listening }
    }

    /// A command for `sh` that ends when the server is up again.
    pub(crate) fn restart_command(&self) -> String {
        format!("curl --fail --silent --show-error --max-time 60 http://{}/", self.control)
    }

    async fn restart(&self) {
        let ended = tokio::process::Command::new("sh").args(["-c", &self.restart_command()]).status().await;
        assert!(ended.expect("sh is there").success(), "curl must be installed: it asks for the restart");
    }

    async fn count(&self) -> u64 {
        Client::new(self.addr).get("/effects").send().await.unwrap().json()["count"].as_u64().unwrap()
    }

    async fn pay(&self, key: &str, body: &'static str) -> u16 {
        Client::new(self.addr).post("/pay").key(key).body(body).send().await.unwrap().status
    }
}

impl Drop for Killable {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Life {
    async fn restart(&mut self) {
        self.process.kill_9().await.unwrap();
        self.process = spawn(self.nature, self.folder.path(), self.addr).await;
    }
}

async fn obey(listener: TcpListener, mut life: Life) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let _ = stream.read(&mut [0; 1024]).await;
        life.restart().await;
        let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
    }
}

async fn spawn(nature: Nature, folder: &Path, addr: SocketAddr) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "killed::plays_its_part", "--nocapture"]);
    command.env(JOURNAL, folder.join("journal")).env(ADDR, addr.to_string());
    command.env(NATURE, nature.name());
    let mut process = Process::from_command(command.into()).unwrap();
    process.wait_output("listens on <").await.unwrap();
    process
}

/// Is a server when another test of this file asks for it; by itself, it shows that the journal holds what was paid.
#[tokio::test(flavor = "multi_thread")]
async fn plays_its_part() {
    if let Some(journal) = std::env::var_os(JOURNAL) {
        return be_a_server(PathBuf::from(journal)).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut bodies = Vec::new();
    for _ in 0..2 {
        let shop = Shop::recover(Nature::default(), &folder.path().join("journal"));
        let server = Server::start_on("127.0.0.1:0".parse().unwrap(), shop, Nature::default()).await;
        let client = Client::new(server.addr);
        bodies.push(client.post("/pay").key("k").body(BODY).send().await.unwrap().body);
        let count = client.get("/effects").send().await.unwrap().json()["count"].clone();
        assert_eq!(count, 1);
    }
    assert_eq!(bodies[0], bodies[1]);
}

async fn be_a_server(journal: PathBuf) {
    let nature = Nature::named(&std::env::var(NATURE).unwrap());
    let shop = Shop::recover(nature, &journal);
    let server = Server::start_on(std::env::var(ADDR).unwrap().parse().unwrap(), shop, nature).await;
    println!("\nlistens on <{}>", server.addr);
    // Whoever started it may end without a word.
    let parent = std::os::unix::process::parent_id();
    while std::os::unix::process::parent_id() == parent {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// How often it was paid, and whether the key answers in the end, after a kill in mid-request and one after the answer.
async fn after_crashes(nature: Nature) -> [(u64, bool); 2] {
    let server = Killable::start(nature).await;
    let head = format!(
        "POST /pay HTTP/1.1\r\nHost: zoo\r\nIdempotency-Key: a\r\nContent-Length: {}\r\n\r\n",
        SLOW.len()
    );
    let mut connection = RawConnection::open(server.addr).await;
    connection.write(format!("{head}{SLOW}")).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    server.restart().await;
    let middle = (server.pay("a", SLOW).await == 201, server.count().await);
    let before = server.count().await;
    server.pay("b", BODY).await;
    server.restart().await;
    let end = server.pay("b", BODY).await == 201;
    [(middle.1, middle.0), (server.count().await - before, end)]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_shows_who_is_wrong() {
    let (right, stuck, again, forgets, unknown) = tokio::join!(
        after_crashes(Nature::default()),
        after_crashes(Defect::StuckAfterCrash.into()),
        after_crashes(Defect::RunsAgainAfterCrash.into()),
        after_crashes(Defect::ForgetsOnRestart.into()),
        after_crashes(Breed::UnknownAfterCrash.into()),
    );
    assert_eq!(right, [(1, true), (1, true)]);
    assert_eq!(stuck, [(0, false), (1, true)]);
    assert_eq!(again, [(2, true), (1, true)]);
    assert_eq!(forgets, [(1, true), (2, true)]);
    assert_eq!(unknown, [(1, false), (1, true)]);
}
