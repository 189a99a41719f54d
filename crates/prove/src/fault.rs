//! A TCP proxy that does what networks do: delays, silence, cuts, and a reply that is lost after the request arrived.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

const CHUNK_BYTES: usize = 64 * 1024;

/// A proxy in front of one address; every connection ends when it is dropped.
#[derive(Debug)]
pub struct FaultProxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accept: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    target: Mutex<SocketAddr>,
    state: watch::Sender<State>,
    needle: Mutex<Option<Needle>>,
    lost_replies: AtomicUsize,
    stalled: AtomicUsize,
    connections: AtomicUsize,
}

/// What the network is like now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    refusing: bool,
    silent: bool,
    delay: Duration,
    hold_replies: Duration,
    /// Grows with each cut: connections of an older generation end.
    generation: u64,
}

#[derive(Debug)]
struct Needle {
    bytes: Vec<u8>,
    left: usize,
}

/// The two directions of one connection share it: once a request with the needle went by, its reply is lost.
#[derive(Debug, Default)]
struct Doomed(AtomicBool);

impl FaultProxy {
    /// Listens on a free loopback port and passes everything on to `target`.
    ///
    /// # Panics
    /// When there is no free loopback port.
    pub async fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(Shared {
            target: Mutex::new(target),
            state: watch::Sender::new(State::default()),
            needle: Mutex::new(None),
            lost_replies: AtomicUsize::new(0),
            stalled: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
        });
        let accept = tokio::spawn(accept(listener, shared.clone()));
        Self { addr, shared, accept }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// New connections go to `target` from now on.
    pub fn retarget(&self, target: SocketAddr) {
        *self.shared.target.lock() = target;
    }

    /// Ends every connection now: of what is sent from now on nothing arrives on them. New ones are accepted.
    pub fn cut(&self) {
        self.shared.state.send_modify(|s| s.generation += 1);
    }

    /// While set, new connections are closed at once. Those that are open stay: see [`cut`](Self::cut).
    pub fn refuse(&self, refusing: bool) {
        self.shared.state.send_modify(|s| s.refusing = refusing);
    }

    /// While set, nothing passes in either direction and nobody is told: a network that drops packets. What was sent
    /// meanwhile passes afterwards.
    pub fn silence(&self, silent: bool) {
        self.shared.state.send_modify(|s| s.silent = silent);
    }

    /// Every piece waits this long, in each direction.
    pub fn delay(&self, delay: Duration) {
        self.shared.state.send_modify(|s| s.delay = delay);
    }

    /// Every piece of a reply waits this long; requests pass.
    pub fn hold_replies(&self, hold: Duration) {
        self.shared.state.send_modify(|s| s.hold_replies = hold);
    }

    /// The next request piece that contains `needle` reaches the target; its reply does not reach the client: the
    /// connection ends in its place.
    pub fn lose_reply_to(&self, needle: impl Into<Vec<u8>>) {
        self.lose_replies_to(needle, 1);
    }

    /// As [`lose_reply_to`](Self::lose_reply_to), `times` in a row.
    pub fn lose_replies_to(&self, needle: impl Into<Vec<u8>>, times: usize) {
        *self.shared.needle.lock() = Some(Needle { bytes: needle.into(), left: times });
    }

    /// How many replies were lost so far.
    pub fn lost_replies(&self) -> usize {
        self.shared.lost_replies.load(Ordering::SeqCst)
    }

    /// How many pieces met [`silence`](Self::silence) so far.
    pub fn stalled(&self) -> usize {
        self.shared.stalled.load(Ordering::SeqCst)
    }

    /// How many connections were accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Dropped with this task, and every connection with it.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                if shared.state.borrow().refusing {
                    continue;
                }
                shared.connections.fetch_add(1, Ordering::SeqCst);
                connections.spawn(connection(client, shared.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(client: TcpStream, shared: Arc<Shared>) {
    let mut state = shared.state.subscribe();
    let born = state.borrow_and_update().generation;
    let target = *shared.target.lock();
    let Ok(server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let doomed = Doomed::default();
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let up = requests(client_read, server_write, &shared, &doomed, born);
    let down = replies(server_read, client_write, &shared, &doomed, born);
    tokio::pin!(up, down);
    let passed = async {
        tokio::select! {
            // A client that half-closes still reads.
            () = &mut up => { down.await; }
            // A server that closes, or a lost reply, ends the connection.
            () = &mut down => {}
        }
    };
    tokio::select! {
        () = passed => {}
        _ = state.wait_for(|s| s.generation != born) => {}
    }
}

async fn requests(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    doomed: &Doomed,
    born: u64,
) {
    let mut state = shared.state.subscribe();
    let mut piece = vec![0; CHUNK_BYTES];
    while let Ok(n @ 1..) = from.read(&mut piece).await {
        if !travel(&mut state, shared, born).await {
            return;
        }
        if shared.takes_needle(&piece[..n]) {
            doomed.0.store(true, Ordering::SeqCst);
        }
        if to.write_all(&piece[..n]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}

async fn replies(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    doomed: &Doomed,
    born: u64,
) {
    let mut state = shared.state.subscribe();
    let mut piece = vec![0; CHUNK_BYTES];
    while let Ok(n @ 1..) = from.read(&mut piece).await {
        // Asked after the read: a reply to the request with the needle cannot be here before it was sent.
        if doomed.0.load(Ordering::SeqCst) {
            shared.lost_replies.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let hold = state.borrow().hold_replies;
        if !hold.is_zero() {
            tokio::time::sleep(hold).await;
        }
        if !travel(&mut state, shared, born).await || to.write_all(&piece[..n]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}

/// The way through the network: its delay, then its silence. False when it was cut.
async fn travel(state: &mut watch::Receiver<State>, shared: &Shared, born: u64) -> bool {
    let delay = state.borrow_and_update().delay;
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    if state.borrow_and_update().silent {
        shared.stalled.fetch_add(1, Ordering::SeqCst);
    }
    let _ = state.wait_for(|s| !s.silent).await;
    // Asked here too: the connection's own task hears of a cut only when it runs next.
    state.borrow().generation == born
}

impl Shared {
    /// Whether a request piece has the needle and its reply must be lost.
    fn takes_needle(&self, piece: &[u8]) -> bool {
        let mut needle = self.needle.lock();
        let Some(wanted) = needle.as_mut() else { return false };
        if !piece.windows(wanted.bytes.len()).any(|w| w == wanted.bytes) {
            return false;
        }
        wanted.left -= 1;
        if wanted.left == 0 {
            *needle = None;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::{RawConnection, RawUpstream};

    async fn echo() -> RawUpstream {
        RawUpstream::answering("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await
    }

    const ASK: &str = "GET /a HTTP/1.1\r\n\r\n";

    #[tokio::test]
    async fn a_lost_reply_reached_the_target_and_ends_the_connection() {
        let target = echo().await;
        let proxy = FaultProxy::start(target.addr()).await;
        proxy.lose_reply_to("GET /lost");
        let mut kept = RawConnection::open(proxy.addr()).await;
        kept.write(ASK).await;
        assert!(kept.read_head().await.is_some());
        let mut lost = RawConnection::open(proxy.addr()).await;
        lost.write("GET /lost HTTP/1.1\r\n\r\n").await;
        assert_eq!(lost.read_head().await, None);
        assert!(target.text().contains("GET /lost"));
        assert_eq!((proxy.lost_replies(), proxy.connections()), (1, 2));
        let mut again = RawConnection::open(proxy.addr()).await;
        again.write("GET /lost HTTP/1.1\r\n\r\n").await;
        assert!(again.read_head().await.is_some());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_sent_after_a_cut_never_arrives() {
        let target = echo().await;
        let proxy = FaultProxy::start(target.addr()).await;
        for n in 0..200 {
            let mut open = RawConnection::open(proxy.addr()).await;
            open.write(ASK).await;
            assert!(open.read_head().await.is_some());
            proxy.cut();
            open.write("GET /late HTTP/1.1\r\n\r\n").await;
            assert_eq!(open.read_head().await, None, "{n}");
        }
        assert!(!target.text().contains("/late"));
    }

    #[tokio::test]
    async fn cuts_refusals_and_silence_are_what_they_say() {
        let target = echo().await;
        let proxy = FaultProxy::start(target.addr()).await;
        let mut open = RawConnection::open(proxy.addr()).await;
        open.write(ASK).await;
        assert!(open.read_head().await.is_some());
        proxy.refuse(true);
        assert_eq!(RawConnection::open(proxy.addr()).await.read_head().await, None);
        open.write(ASK).await;
        assert!(open.read_head().await.is_some(), "an open connection stays while new ones are refused");
        proxy.cut();
        assert_eq!(open.read_head().await, None);
        proxy.refuse(false);
        proxy.silence(true);
        let mut silent = RawConnection::open(proxy.addr()).await;
        silent.write(ASK).await;
        let early = tokio::time::timeout(Duration::from_millis(100), silent.read_head()).await;
        assert!(early.is_err(), "nothing passes in silence");
        proxy.silence(false);
        assert!(silent.read_head().await.is_some(), "what was sent in silence passes after it");
    }
}
