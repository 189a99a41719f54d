//! Plays a case: the client on one side, the service behind on the other, one way between them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use testkit::{RawConnection, RawUpstream, wait_until};
use tokio::sync::Semaphore;

use crate::case::{Act, Case, Step};
use crate::wire::{Message, read_answer, read_body, read_request};

/// What was seen of one case at both ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Requests, as they reached the service behind.
    pub(crate) requests: Vec<Message>,
    /// Answers as they reached the client, interim ones among them.
    pub(crate) answers: Vec<Message>,
    /// What the client got through a tunnel.
    pub(crate) tunnel: Vec<u8>,
    /// The client read nothing where an answer was due.
    pub(crate) unanswered: bool,
}

/// The service behind: plays the steps of the case that is on.
pub(crate) struct Origin {
    upstream: RawUpstream,
    stage: Arc<Stage>,
}

#[derive(Debug)]
struct Stage {
    steps: Mutex<Vec<Step>>,
    requests: Mutex<Vec<Message>>,
    busy: Mutex<usize>,
    pieces: Semaphore,
}

impl Origin {
    pub(crate) async fn start() -> Self {
        let stage = Arc::new(Stage {
            steps: Mutex::default(),
            requests: Mutex::default(),
            busy: Mutex::default(),
            pieces: Semaphore::new(0),
        });
        let for_connections = stage.clone();
        let upstream =
            RawUpstream::start(move |_, connection| serve(connection, for_connections.clone())).await;
        Self { upstream, stage }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.upstream.addr()
    }

    pub(crate) fn url(&self) -> String {
        self.upstream.url()
    }

    /// Plays the case with the client connected to `to`.
    pub(crate) async fn play(&self, case: &Case, to: SocketAddr) -> Seen {
        let stage = &self.stage;
        stage.steps.lock().clone_from(&case.steps);
        stage.requests.lock().clear();
        stage.pieces.forget_permits(usize::MAX);
        let mut client = RawConnection::open(to).await;
        let mut seen = Seen::default();
        for act in &case.acts {
            if !play_act(act, &mut client, &mut seen, stage).await {
                seen.unanswered = true;
                break;
            }
        }
        drop(client);
        if seen.unanswered {
            // What was sent may still be on its way.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        wait_until("the service behind is done", || *stage.busy.lock() == 0).await;
        seen.requests.clone_from(&stage.requests.lock());
        seen
    }
}

/// False when the peer closed instead.
async fn play_act(act: &Act, client: &mut RawConnection, seen: &mut Seen, stage: &Stage) -> bool {
    match act {
        // A peer that has refused already reads no more.
        Act::Send(bytes) => drop(client.write(bytes).await),
        Act::Pause => tokio::time::sleep(Duration::from_millis(40)).await,
        Act::HalfClose => client.shutdown().await,
        Act::Interim(status) => loop {
            let Some(answer) = read_answer(client, "GET").await else { return false };
            let (got, interim) = (answer.status(), answer.status() < 200);
            seen.answers.push(answer);
            if !interim {
                return false;
            }
            if got == *status {
                return true;
            }
        },
        Act::Answer(method) => loop {
            let Some(answer) = read_answer(client, method).await else { return false };
            let status = answer.status();
            seen.answers.push(answer);
            if status >= 200 || status == 101 {
                return true;
            }
        },
        Act::Piece(piece) => {
            let came = piece.is_empty() || client.wait_for(piece.as_bytes()).await;
            stage.pieces.add_permits(1);
            return came;
        }
        Act::Tunnel(len) => match client.read_exact(*len).await {
            Some(bytes) => seen.tunnel.extend(bytes),
            None => return false,
        },
        Act::TunnelEnd => seen.tunnel.extend(client.read_to_end().await),
    }
    true
}

async fn serve(mut connection: RawConnection, stage: Arc<Stage>) {
    while let Some(request) = read_request(&mut connection).await {
        *stage.busy.lock() += 1;
        let go_on = answer(&mut connection, request, &stage).await;
        *stage.busy.lock() -= 1;
        if !go_on {
            return;
        }
    }
}

async fn answer(connection: &mut RawConnection, request: Message, stage: &Stage) -> bool {
    let number = {
        let mut requests = stage.requests.lock();
        requests.push(request);
        requests.len() - 1
    };
    let steps = stage.steps.lock().clone();
    for step in steps {
        match step {
            Step::Body => {
                let mut request = stage.requests.lock()[number].clone();
                read_body(connection, &mut request).await;
                let complete = request.complete;
                stage.requests.lock()[number] = request;
                if !complete {
                    return false;
                }
            }
            Step::Write(bytes) => drop(connection.write(bytes).await),
            Step::Await => {
                // Past it the case fails by what the client did not get.
                let permit = tokio::time::timeout(Duration::from_secs(20), stage.pieces.acquire()).await;
                if let Ok(Ok(permit)) = permit {
                    permit.forget();
                }
            }
            Step::Echo(len) => {
                if let Some(bytes) = connection.read_exact(len).await {
                    connection.write(bytes).await;
                }
            }
            Step::Close => return false,
        }
    }
    true
}
