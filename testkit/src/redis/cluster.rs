//! A cluster of six: three masters, and a replica of each.

use std::time::Duration;

use super::{Part, Redis, RedisOptions};
use crate::wait_for;

const MASTERS: usize = 3;
const NODES: usize = 6;
const SLOTS: usize = 16384;

/// Six private nodes; 0, 1 and 2 begin as masters, 3, 4 and 5 as their replicas.
#[derive(Clone, Debug)]
pub struct RedisCluster {
    nodes: Vec<Redis>,
}

impl RedisCluster {
    /// A cluster with the defaults.
    ///
    /// # Panics
    /// When it does not come about.
    pub async fn private() -> Self {
        Self::start(&Redis::options()).await
    }

    /// A cluster whose nodes are set up so. A node that does not answer for two seconds is replaced.
    ///
    /// # Panics
    /// When it does not come about.
    pub async fn start(options: &RedisOptions) -> Self {
        let start = || RedisOptions { part: Part::Node, ..options.clone() }.start();
        let nodes = tokio::join!(start(), start(), start(), start(), start(), start());
        let cluster = Self { nodes: vec![nodes.0, nodes.1, nodes.2, nodes.3, nodes.4, nodes.5] };
        cluster.form().await;
        cluster
    }

    async fn form(&self) {
        for (n, node) in self.nodes.iter().enumerate() {
            let epoch = (n + 1).to_string();
            assert_eq!(node.cli(["cluster", "set-config-epoch", &epoch]).await, "OK");
            for other in &self.nodes[..n] {
                let (port, bus) = (other.port().to_string(), other.bus_port().to_string());
                assert_eq!(node.cli(["cluster", "meet", "127.0.0.1", &port, &bus]).await, "OK");
            }
        }
        for (n, node) in self.nodes[..MASTERS].iter().enumerate() {
            let [first, last] =
                [SLOTS * n / MASTERS, SLOTS * (n + 1) / MASTERS - 1].map(|slot| slot.to_string());
            assert_eq!(node.cli(["cluster", "addslotsrange", &first, &last]).await, "OK");
        }
        for (n, replica) in self.nodes[MASTERS..].iter().enumerate() {
            let master = self.nodes[n].cli(["cluster", "myid"]).await;
            wait_for("a replica knows its master", async || {
                (replica.cli(["cluster", "replicate", &master]).await == "OK").then_some(())
            })
            .await;
        }
        self.settled().await;
    }

    /// Waits until every node that runs sees every slot served, and each replica is in step.
    ///
    /// # Panics
    /// When that does not come about.
    pub async fn settled(&self) {
        for node in &self.nodes {
            if !node.runs() {
                continue;
            }
            wait_for("a node sees a whole cluster", async || {
                let info = node.cli(["cluster", "info"]).await;
                let known = node.cli(["cluster", "nodes"]).await;
                let replication = node.cli(["info", "replication"]).await;
                let whole = info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384");
                let all = known.lines().count() == NODES && !known.contains("handshake");
                let in_step =
                    replication.contains("role:master") || replication.contains("master_link_status:up");
                (whole && all && in_step).then_some(())
            })
            .await;
        }
        // A master counts a replica when it has heard from it.
        for node in &self.nodes {
            if node.runs()
                && node.cli(["role"]).await.starts_with("master")
                && self.nodes.iter().all(Redis::runs)
            {
                wait_for("a master counts its replica", async || {
                    node.cli(["wait", "1", "100"]).await.starts_with('1').then_some(())
                })
                .await;
            }
        }
    }

    /// A node by its number.
    pub fn node(&self, n: usize) -> &Redis {
        &self.nodes[n]
    }

    /// All six.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// A URL with every node.
    pub fn url(&self) -> String {
        let nodes: Vec<_> = self.nodes.iter().map(|node| node.addr().to_string()).collect();
        format!("redis+cluster://{}", nodes.join(","))
    }

    /// The number of the node that serves this key now, as the nodes that run see it.
    ///
    /// # Panics
    /// When none does in time.
    pub async fn master_of(&self, key: &str) -> usize {
        wait_for("somebody serves the slot", async || {
            for (n, node) in self.nodes.iter().enumerate() {
                // It says itself whether the key is its own, and takes writes.
                if node.runs()
                    && node.cli(["role"]).await.starts_with("master")
                    && !node.cli(["exists", key]).await.contains("MOVED")
                {
                    return Some(n);
                }
            }
            None
        })
        .await
    }

    /// Waits until another node than `old` serves this key and takes writes; answers its number.
    ///
    /// # Panics
    /// When that does not come about.
    pub async fn failed_over(&self, key: &str, old: usize) -> usize {
        wait_for("a replica takes the place of its master", async || {
            for (n, node) in self.nodes.iter().enumerate() {
                if n != old
                    && node.runs()
                    && node.cli(["role"]).await.starts_with("master")
                    && node.cli(["cluster", "info"]).await.contains("cluster_state:ok")
                    && !node.cli(["exists", key]).await.contains("MOVED")
                {
                    return Some(n);
                }
            }
            None
        })
        .await
    }

    /// The slot of a key.
    ///
    /// # Panics
    /// When the first node does not say.
    pub async fn slot_of(&self, key: &str) -> u16 {
        self.nodes[0].cli(["cluster", "keyslot", key]).await.parse().expect("a slot")
    }

    /// Opens a slot for its move from one master to another: keys that are not on the first any more are asked for at the
    /// second.
    ///
    /// # Panics
    /// When a node refuses.
    pub async fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let (slot, [source, target]) = (slot.to_string(), self.ids([from, to]).await);
        assert_eq!(self.nodes[to].cli(["cluster", "setslot", &slot, "importing", &source]).await, "OK");
        assert_eq!(self.nodes[from].cli(["cluster", "setslot", &slot, "migrating", &target]).await, "OK");
    }

    /// Moves one key of a slot that is open.
    ///
    /// # Panics
    /// When a node refuses.
    pub async fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.nodes[to].port().to_string();
        let moved = self.nodes[from].cli(["migrate", "127.0.0.1", &port, key, "0", "5000"]).await;
        assert_eq!(moved, "OK");
    }

    /// Moves every key of a slot that is open, and closes it.
    ///
    /// # Panics
    /// When a node refuses.
    pub async fn end_move(&self, slot: u16, from: usize, to: usize) {
        let (text, [_, target]) = (slot.to_string(), self.ids([from, to]).await);
        loop {
            let keys = self.nodes[from].cli(["cluster", "getkeysinslot", &text, "100"]).await;
            if keys.is_empty() {
                break;
            }
            let port = self.nodes[to].port().to_string();
            let migrate = ["migrate", "127.0.0.1", &port, "", "0", "5000", "keys"].map(str::to_owned);
            let all = migrate.into_iter().chain(keys.lines().map(str::to_owned)).collect();
            // A key that ended in the meantime need not be moved.
            let moved = self.nodes[from].cli_with(all).await;
            assert!(moved == "OK" || moved == "NOKEY", "{moved}");
        }
        for n in [to, from] {
            assert_eq!(self.nodes[n].cli(["cluster", "setslot", &text, "node", &target]).await, "OK");
        }
    }

    async fn ids(&self, nodes: [usize; 2]) -> [String; 2] {
        let id = async |n: usize| self.nodes[n].cli(["cluster", "myid"]).await;
        [id(nodes[0]).await, id(nodes[1]).await]
    }

    /// A key of the form `PREFIX-N` whose master is this node now.
    ///
    /// # Panics
    /// When there is none.
    pub async fn key_on(&self, prefix: &str, node: usize) -> String {
        for n in 0..1000 {
            let key = format!("{prefix}-{n}");
            if !self.nodes[node].cli(["exists", &key]).await.contains("MOVED") {
                return key;
            }
        }
        panic!("no key on node {node}")
    }

    /// Empties it.
    ///
    /// # Panics
    /// When a master refuses.
    pub async fn flush(&self) {
        for node in &self.nodes {
            if node.cli(["role"]).await.starts_with("master") {
                assert_eq!(node.cli(["flushall"]).await, "OK");
            }
        }
    }

    /// How long a node may be away before it is replaced.
    pub fn node_timeout(&self) -> Duration {
        Duration::from_secs(2)
    }
}
