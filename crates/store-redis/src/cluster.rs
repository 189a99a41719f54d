//! The map of a cluster: which node has which slot, and since when as far as this process saw.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::StoreErrorKind;
use parking_lot::{Mutex, RwLock};
use redis::{ServerError, ServerErrorKind, Value};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::clock_ms;
use crate::error::Fault;
use crate::names::SLOTS;
use crate::node::Node;
use crate::open::{Address, Options};
use crate::request::Request;

/// The map is not asked for more often than this.
const REFRESH_PAUSE_MS: u64 = 50;
/// How long a node may take to tell its view of the cluster.
const VIEW_PATIENCE: Duration = Duration::from_millis(500);

/// Where a server sends us for a slot.
pub(crate) enum Redirect {
    /// For good.
    Moved(String),
    /// For this one request: the slot is on its way there.
    Ask(String),
}

impl Redirect {
    pub(crate) fn of(error: &ServerError) -> Option<Self> {
        let kind = error.kind()?;
        let address = error.details()?.split_ascii_whitespace().nth(1)?.to_owned();
        match kind {
            ServerErrorKind::Moved => Some(Self::Moved(address)),
            ServerErrorKind::Ask => Some(Self::Ask(address)),
            _ => None,
        }
    }
}

/// A cluster as this process knows it.
#[derive(Debug)]
pub(crate) struct Cluster {
    options: Arc<Options>,
    map: RwLock<Map>,
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    refreshing: tokio::sync::Mutex<u64>,
}

#[derive(Debug)]
struct Map {
    slots: Vec<Option<Owner>>,
    epoch: u64,
}

#[derive(Clone, Debug)]
struct Owner {
    node: Arc<Node>,
    // 0: it was so when this process first looked.
    since_ms: u64,
}

/// One node's view.
struct View {
    epoch: u64,
    healthy: bool,
    ranges: Vec<(u16, u16, Address)>,
}

impl Cluster {
    pub(crate) fn new(options: &Arc<Options>) -> Self {
        let slots = vec![None; usize::from(SLOTS)];
        Self {
            options: Arc::clone(options),
            map: RwLock::new(Map { slots, epoch: 0 }),
            nodes: Mutex::default(),
            refreshing: tokio::sync::Mutex::new(0),
        }
    }

    pub(crate) async fn node_of(&self, slot: u16) -> Result<Arc<Node>, Fault> {
        if let Some(node) = self.known(slot) {
            return Ok(node);
        }
        let refreshed = self.refresh_now().await;
        self.known(slot).ok_or_else(|| {
            refreshed.err().unwrap_or_else(|| {
                let why = format!("no node of the cluster has slot {slot}");
                Fault::new(StoreErrorKind::Unavailable, why)
            })
        })
    }

    fn known(&self, slot: u16) -> Option<Arc<Node>> {
        self.map.read().slots[usize::from(slot)].as_ref().map(|owner| Arc::clone(&owner.node))
    }

    /// The masters, each once.
    pub(crate) async fn masters(&self) -> Result<Vec<Arc<Node>>, Fault> {
        self.refresh_now().await?;
        let map = self.map.read();
        let mut masters: Vec<Arc<Node>> = Vec::new();
        for (slot, owner) in map.slots.iter().enumerate() {
            let Some(owner) = owner else {
                let why = format!("no node of the cluster has slot {slot}");
                return Err(Fault::new(StoreErrorKind::Unavailable, why));
            };
            if !masters.iter().any(|known| Arc::ptr_eq(known, &owner.node)) {
                masters.push(Arc::clone(&owner.node));
            }
        }
        Ok(masters)
    }

    /// Every node that may be asked for records one day: those of the URL, and the replicas that are known. Without the
    /// right to ask for them (CLUSTER NODES) they are checked when they are masters.
    pub(crate) async fn candidates(&self) -> Result<BTreeSet<Address>, Fault> {
        let mut candidates: BTreeSet<_> = self.options.servers.iter().cloned().collect();
        let mut nodes = redis::cmd("CLUSTER");
        nodes.arg("NODES");
        let request = Request::of([nodes]);
        for master in self.masters().await? {
            let (answers, _) = master.ask(&request, false, false).await?;
            let text = match answers.into_iter().next() {
                Some(Value::BulkString(text)) => String::from_utf8_lossy(&text).into_owned(),
                Some(Value::VerbatimString { text, .. }) => text,
                _ => continue,
            };
            candidates.extend(text.lines().filter_map(replica_of));
            break;
        }
        Ok(candidates)
    }

    pub(crate) fn unbroken_for(&self, slot: u16, time: Duration) -> bool {
        let map = self.map.read();
        let Some(owner) = &map.slots[usize::from(slot)] else { return false };
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let long_enough = owner.since_ms == 0 || clock_ms().saturating_sub(owner.since_ms) >= time_ms;
        long_enough && owner.node.unbroken_for(time)
    }

    /// The node at an address that another node told: `host:port`, or `:port` on its own host.
    pub(crate) fn node_at(&self, told: &str, by: Option<&Node>) -> Option<Arc<Node>> {
        let (host, port) = told.rsplit_once(':')?;
        let port = port.parse().ok()?;
        let host = match (host, by.and_then(Node::address)) {
            ("" | "?", Some(Address::Tcp(host, _))) => host.clone(),
            ("" | "?", _) => return None,
            (host, _) => host.trim_matches(['[', ']']).to_owned(),
        };
        Some(self.node(Address::Tcp(host, port)))
    }

    fn node(&self, address: Address) -> Arc<Node> {
        let mut nodes = self.nodes.lock();
        let node = nodes
            .entry(address)
            .or_insert_with_key(|address| Node::new(Some(address.clone()), &self.options));
        Arc::clone(node)
    }

    /// A server says that a slot is elsewhere now.
    pub(crate) fn moved(&self, slot: u16, to: &str, by: Option<&Node>) {
        if let Some(node) = self.node_at(to, by) {
            self.map.write().give(slot, &node);
        }
    }

    /// Asks for the map again, if nobody did a moment ago.
    pub(crate) async fn refresh(&self) {
        // An old map is better than none: whoever follows it is told.
        let _ = self.refresh_now().await;
    }

    async fn refresh_now(&self) -> Result<(), Fault> {
        let mut last_ms = self.refreshing.lock().await;
        if clock_ms() < *last_ms + REFRESH_PAUSE_MS && self.map.read().slots.iter().all(Option::is_some) {
            return Ok(());
        }
        let view = self.best_view().await;
        *last_ms = clock_ms();
        let view = view?;
        let ranges: Vec<_> = view.ranges.into_iter().map(|(a, b, at)| (a, b, self.node(at))).collect();
        let mut map = self.map.write();
        // A node that was cut off tells of times past.
        if view.epoch >= map.epoch {
            map.epoch = view.epoch;
            for (first, last, node) in &ranges {
                (*first..=*last).for_each(|slot| map.give(slot, node));
            }
        }
        drop(map);
        self.forget_strangers();
        Ok(())
    }

    /// Asks every node that is known, and the ones of the URL, and takes the latest view of a healthy one.
    async fn best_view(&self) -> Result<View, Fault> {
        let known: Vec<_> = self.nodes.lock().values().cloned().collect();
        let seeds = self.options.servers.iter().map(|seed| self.node(seed.clone()));
        let mut asked = JoinSet::new();
        let mut all = known;
        for seed in seeds {
            if !all.iter().any(|node| Arc::ptr_eq(node, &seed)) {
                all.push(seed);
            }
        }
        for node in all {
            asked.spawn(async move {
                timeout(VIEW_PATIENCE, view_of(&node)).await.unwrap_or_else(|_| {
                    Err(Fault::new(StoreErrorKind::Unavailable, "a node of the cluster does not answer"))
                })
            });
        }
        let mut best: Option<View> = None;
        let mut unfit = None;
        let mut last = Fault::unfit("the URL names no node of the cluster");
        while let Some(view) = asked.join_next().await {
            match view {
                Ok(Ok(view)) => {
                    let better = best.as_ref().is_none_or(|best| {
                        (view.healthy, view.epoch, view.ranges.len())
                            > (best.healthy, best.epoch, best.ranges.len())
                    });
                    if better {
                        best = Some(view);
                    }
                }
                Ok(Err(fault)) if fault.kind == StoreErrorKind::Unfit => unfit = Some(fault),
                Ok(Err(fault)) => last = fault,
                Err(_) => {}
            }
        }
        best.ok_or_else(|| unfit.unwrap_or(last))
    }

    // A node that has no slot any more and is not in the URL is not asked again.
    fn forget_strangers(&self) {
        let map = self.map.read();
        self.nodes.lock().retain(|address, node| {
            self.options.servers.contains(address)
                || map.slots.iter().flatten().any(|owner| Arc::ptr_eq(&owner.node, node))
        });
    }

    pub(crate) async fn look_after(&self, idle_ms: u64) {
        let mut masters: Vec<Arc<Node>> = Vec::new();
        for owner in self.map.read().slots.iter().flatten() {
            if !masters.iter().any(|known| Arc::ptr_eq(known, &owner.node)) {
                masters.push(Arc::clone(&owner.node));
            }
        }
        let mut looked = JoinSet::new();
        for node in masters {
            looked.spawn(async move {
                node.look_after(idle_ms).await;
                node.unbroken_for(Duration::ZERO)
            });
        }
        let well = looked.join_all().await;
        if well.is_empty() || well.contains(&false) {
            self.refresh().await;
        }
    }
}

impl Map {
    fn give(&mut self, slot: u16, node: &Arc<Node>) {
        let place = &mut self.slots[usize::from(slot)];
        *place = match place.take() {
            Some(owner) if Arc::ptr_eq(&owner.node, node) => Some(owner),
            Some(_) => Some(Owner { node: Arc::clone(node), since_ms: clock_ms() }),
            None => Some(Owner { node: Arc::clone(node), since_ms: 0 }),
        };
    }
}

async fn view_of(node: &Node) -> Result<View, Fault> {
    let question = |what: &str| {
        let mut command = redis::cmd("CLUSTER");
        command.arg(what);
        command
    };
    let request = Request::of([question("INFO"), question("SLOTS")]);
    let (answers, _) = node.ask(&request, false, false).await?;
    let strange = || Fault::strange("to CLUSTER SLOTS");
    if let Some(Value::ServerError(error)) = answers.get(1) {
        return Err(Fault::refused(error));
    }
    let info = match answers.first() {
        Some(Value::BulkString(text)) => String::from_utf8_lossy(text).into_owned(),
        Some(Value::VerbatimString { text, .. }) => text.clone(),
        // Without the right to ask, any view is as good as the other.
        _ => String::new(),
    };
    let field = |name: &str| {
        info.lines().filter_map(|line| line.split_once(':')).find(|(n, _)| *n == name).map(|(_, v)| v.trim())
    };
    let Some(Value::Array(slots)) = answers.get(1) else { return Err(strange()) };
    let ranges = slots.iter().filter_map(|range| range_of(range, node.address())).collect();
    Ok(View {
        epoch: field("cluster_current_epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0),
        healthy: field("cluster_state").is_none_or(|state| state == "ok"),
        ranges,
    })
}

/// First slot, last slot, and the master of one range.
fn range_of(range: &Value, told_by: Option<&Address>) -> Option<(u16, u16, Address)> {
    let Value::Array(parts) = range else { return None };
    let [Value::Int(first), Value::Int(last), master, ..] = parts.as_slice() else { return None };
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    (first <= last && last < SLOTS).then_some((first, last, address_of(master, told_by)?))
}

/// The address in a line of CLUSTER NODES, if it is a replica that is well: `id host:port@bus,name flags …`.
fn replica_of(line: &str) -> Option<Address> {
    let mut fields = line.split(' ').skip(1);
    let (address, flags) = (fields.next()?, fields.next()?);
    if !flags.split(',').any(|flag| flag == "slave") || flags.contains("fail") || flags.contains("noaddr") {
        return None;
    }
    let (host, port) = address.split('@').next()?.rsplit_once(':')?;
    (!host.is_empty()).then_some(Address::Tcp(host.into(), port.parse().ok()?))
}

fn address_of(node: &Value, told_by: Option<&Address>) -> Option<Address> {
    let Value::Array(parts) = node else { return None };
    let [host, Value::Int(port), ..] = parts.as_slice() else { return None };
    let host = match host {
        Value::BulkString(host) if !host.is_empty() && host != b"?" => {
            String::from_utf8(host.clone()).ok()?
        }
        // "The one you asked."
        Value::Nil | Value::BulkString(_) => match told_by? {
            Address::Tcp(host, _) => host.clone(),
            Address::Unix(_) => return None,
        },
        _ => return None,
    };
    Some(Address::Tcp(host, u16::try_from(*port).ok()?))
}
