//! From the name of a key to the server that has it, over moves, failovers and broken connections.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{LeaseToken, StoreErrorKind};
use redis::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::adrift::Adrift;
use crate::cluster::{Cluster, Redirect};
use crate::error::Fault;
use crate::fitness::Durability;
use crate::link::Link;
use crate::names::slot;
use crate::node::Node;
use crate::open::{Kind, Options};
use crate::request::Request;

/// How a request may be treated on its way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct How {
    /// Sent on the connection whose writes replicas are asked to confirm.
    pub(crate) replicated: bool,
    /// Safe to be carried out twice, so it is sent again when its answer was lost.
    pub(crate) repeatable: bool,
    /// The token, where it is a claim whose copies must not come alive after it was taken back.
    pub(crate) claim: Option<LeaseToken>,
}

/// All servers of a store.
#[derive(Debug)]
pub(crate) struct Routes {
    pub(crate) options: Arc<Options>,
    pub(crate) adrift: Arc<Adrift>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    One(Arc<Node>),
    Many(Cluster),
}

impl Routes {
    pub(crate) fn new(options: &Arc<Options>) -> Self {
        let place = match &options.kind {
            Kind::Single => Place::One(Node::new(options.servers.first().cloned(), options)),
            Kind::Sentinel(_) => Place::One(Node::new(None, options)),
            Kind::Cluster => Place::Many(Cluster::new(options)),
        };
        Self { options: Arc::clone(options), adrift: Arc::default(), place }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.place, Place::Many(_))
    }

    /// Sends the commands to the server that has `name`, and returns the answers, none of them an error, and the link
    /// that they came on.
    pub(crate) async fn ask(
        &self,
        name: &[u8],
        request: &Request<'_>,
        how: How,
    ) -> Result<(Vec<Value>, Arc<Link>), Fault> {
        let mut journey = Journey::new(self.options.timeout);
        let mut asking: Option<Arc<Node>> = None;
        loop {
            let target = match asking.take() {
                Some(node) => Ok((node, true)),
                None => self.node_of(name).await.map(|node| (node, false)),
            };
            let answered = match &target {
                Ok((node, asking)) => self.ask_once(node, request, how, *asking).await,
                Err(fault) => Err(fault.clone()),
            };
            let fault = match answered {
                Ok((values, link)) => match first_error(&values) {
                    None => return Ok((values, link)),
                    Some(error) => match Redirect::of(error) {
                        Some(Redirect::Ask(address)) if journey.may_follow() => {
                            asking = self.node_at(&address, told_by(&target));
                            continue;
                        }
                        Some(Redirect::Moved(address)) if journey.may_follow() => {
                            self.moved(name, &address, told_by(&target));
                            continue;
                        }
                        _ => {
                            // Of several commands those before it were carried out.
                            let some = !matches!(values.first(), Some(Value::ServerError(_)));
                            let fault = Fault::refused(error).with_sent(some);
                            if !is_passing(error.code()) {
                                return Err(journey.end(fault));
                            }
                            // A server that was demoted is left for the one that took its place.
                            if error.code() == "READONLY" {
                                link.give_up();
                            }
                            fault
                        }
                    },
                },
                Err(fault) if fault.sent && !how.repeatable => return Err(fault),
                Err(fault) => fault,
            };
            if !journey.goes_on(&fault).await {
                return Err(journey.end(fault));
            }
            self.refresh().await;
        }
    }

    async fn ask_once(
        &self,
        node: &Node,
        request: &Request<'_>,
        how: How,
        asking: bool,
    ) -> Result<(Vec<Value>, Arc<Link>), Fault> {
        let link = node.link().await?;
        let copy = how.claim.map(|token| self.adrift.copy(token, &request.what, &link));
        let answers = node.ask_on(&link, request, how.replicated, asking).await;
        if let Some(copy) = copy
            && answers.as_ref().err().is_none_or(|fault| !fault.sent)
        {
            copy.end();
        }
        Ok((answers?, link))
    }

    /// Whether the contact with the server that has `name` was seen to be unbroken for this long. The engine watches the
    /// contact with the store as a whole; a cluster can lose one part of it.
    pub(crate) async fn unbroken_for(&self, name: &[u8], time: Duration) -> bool {
        match &self.place {
            Place::One(node) => node.unbroken_for(time),
            Place::Many(cluster) => cluster.unbroken_for(slot(name), time),
        }
    }

    /// Every server that has records: the one, or the masters.
    pub(crate) async fn masters(&self) -> Result<Vec<Arc<Node>>, Fault> {
        match &self.place {
            Place::One(node) => Ok(vec![Arc::clone(node)]),
            Place::Many(cluster) => cluster.masters().await,
        }
    }

    /// What each server said of itself: a master, or a replica that may be one tomorrow.
    pub(crate) async fn fitness(&self) -> Result<Vec<(Durability, bool)>, Fault> {
        let mut links = JoinSet::new();
        for node in self.masters().await? {
            links.spawn(async move { node.link().await.map(Some) });
        }
        if let Place::Many(cluster) = &self.place {
            for node in cluster.candidates().await? {
                let options = Arc::clone(&self.options);
                links.spawn(async move {
                    match Link::open(&options, &node).await {
                        Ok(link) => Ok(Some(link)),
                        Err(fault) if fault.kind == StoreErrorKind::Unfit => Err(fault),
                        // It is checked when it is a master.
                        Err(_) => Ok(None),
                    }
                });
            }
        }
        let links = links.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(links.iter().flatten().map(|link| (link.fitness.durability, link.fitness.may_evict)).collect())
    }

    /// Looks whether the servers are still fit: a policy can be changed while they run.
    pub(crate) async fn check_again(&self) -> Result<(), Fault> {
        for node in self.masters().await? {
            node.check_again().await?;
        }
        Ok(())
    }

    /// Keeps idle connections known to be good, and the map of a cluster fresh while a part of it is away.
    pub(crate) async fn look_after(&self, idle: Duration) {
        let idle_ms = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
        match &self.place {
            Place::One(node) => node.look_after(idle_ms).await,
            Place::Many(cluster) => cluster.look_after(idle_ms).await,
        }
    }

    async fn node_of(&self, name: &[u8]) -> Result<Arc<Node>, Fault> {
        match &self.place {
            Place::One(node) => Ok(Arc::clone(node)),
            Place::Many(cluster) => cluster.node_of(slot(name)).await,
        }
    }

    fn node_at(&self, address: &str, from: Option<&Node>) -> Option<Arc<Node>> {
        match &self.place {
            Place::One(_) => None,
            Place::Many(cluster) => cluster.node_at(address, from),
        }
    }

    fn moved(&self, name: &[u8], address: &str, from: Option<&Node>) {
        if let Place::Many(cluster) = &self.place {
            cluster.moved(slot(name), address, from);
        }
    }

    async fn refresh(&self) {
        if let Place::Many(cluster) = &self.place {
            cluster.refresh().await;
        }
    }
}

/// The time that one call may take, and what happened so far.
struct Journey {
    end: Instant,
    // While nothing was sent there is nothing to find out: the caller hears soon.
    unsent_end: Instant,
    pause: Duration,
    sent: bool,
    redirects_left: u32,
}

impl Journey {
    fn new(time: Duration) -> Self {
        let now = Instant::now();
        let pause = Duration::from_millis(5);
        Self { end: now + time, unsent_end: now + time / 3, pause, sent: false, redirects_left: 16 }
    }

    fn may_follow(&mut self) -> bool {
        self.redirects_left = self.redirects_left.saturating_sub(1);
        self.redirects_left > 0
    }

    /// Waits a little, and tells whether there is time to try again.
    async fn goes_on(&mut self, fault: &Fault) -> bool {
        self.sent |= fault.sent;
        let end = if self.sent { self.end } else { self.unsent_end };
        if !fault.is_passing() || Instant::now() + self.pause >= end {
            return false;
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(Duration::from_millis(80));
        true
    }

    /// An attempt before this one may have been carried out, whatever came of this one.
    fn end(&self, fault: Fault) -> Fault {
        let sent = fault.sent || self.sent;
        fault.with_sent(sent)
    }
}

fn told_by(target: &Result<(Arc<Node>, bool), Fault>) -> Option<&Node> {
    target.as_ref().ok().map(|(node, _)| &**node)
}

fn first_error(values: &[Value]) -> Option<&redis::ServerError> {
    values.iter().find_map(|value| match value {
        Value::ServerError(error) => Some(error),
        _ => None,
    })
}

/// Errors that go away by themselves.
fn is_passing(code: &str) -> bool {
    matches!(
        code,
        "LOADING"
            | "CLUSTERDOWN"
            | "MASTERDOWN"
            | "TRYAGAIN"
            | "READONLY"
            | "MOVED"
            | "ASK"
            | "BUSY"
            | "NOSCRIPT"
    )
}
