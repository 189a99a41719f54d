//! A proxy in front of a server that takes its time to start.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinHandle;

/// Passes connections on; after each restart of its server the first few are turned away.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) addr: SocketAddr,
    control: SocketAddr,
    state: Arc<State>,
    listening: [JoinHandle<()>; 2],
}

#[derive(Debug, Default)]
struct State {
    to_turn_away: AtomicUsize,
    turned_away: AtomicUsize,
}

impl Door {
    /// How many connections after a restart do not reach the server.
    pub(crate) const TURNS_AWAY: usize = 4;

    pub(crate) async fn start(server: SocketAddr, restart: &str) -> Self {
        let (door, bell) = (listen().await, listen().await);
        let (addr, control) = (door.local_addr().unwrap(), bell.local_addr().unwrap());
        let state = Arc::<State>::default();
        let passing = tokio::spawn(pass(door, server, state.clone()));
        let obeying = tokio::spawn(obey(bell, restart.to_owned(), state.clone()));
        Self { addr, control, state, listening: [passing, obeying] }
    }

    pub(crate) fn restart_command(&self) -> String {
        format!("curl --fail --silent --show-error --max-time 60 http://{}/", self.control)
    }

    pub(crate) fn turned_away(&self) -> usize {
        self.state.turned_away.load(Ordering::SeqCst)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.listening.iter().for_each(JoinHandle::abort);
    }
}

async fn listen() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

async fn obey(bell: TcpListener, restart: String, state: Arc<State>) {
    while let Ok((mut stream, _)) = bell.accept().await {
        let _ = stream.read(&mut [0; 1024]).await;
        assert!(Command::new("sh").args(["-c", &restart]).status().await.unwrap().success());
        // The first is only asked whether anybody listens.
        state.to_turn_away.store(Door::TURNS_AWAY + 1, Ordering::SeqCst);
        let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
    }
}

async fn pass(door: TcpListener, server: SocketAddr, state: Arc<State>) {
    while let Ok((mut client, _)) = door.accept().await {
        let left = state.to_turn_away.load(Ordering::SeqCst);
        if left > 0 {
            state.to_turn_away.store(left - 1, Ordering::SeqCst);
            state.turned_away.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(turn_away(client, left));
            continue;
        }
        tokio::spawn(async move {
            let Ok(mut server) = TcpStream::connect(server).await else { return };
            let _ = copy_bidirectional(&mut client, &mut server).await;
        });
    }
}

/// As nginx does, or as a published port of a container: hangs up.
async fn turn_away(mut client: TcpStream, nth: usize) {
    let _ = client.read(&mut [0; 4096]).await;
    if nth.is_multiple_of(2) {
        let answer =
            "HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 11\r\n\r\nBad Gateway";
        let _ = client.write_all(answer.as_bytes()).await;
    }
}
