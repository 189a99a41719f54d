//! A master and its replicas, watched by three Sentinels.

use super::{Part, Redis, RedisOptions};
use crate::wait_for;

/// The name that the Sentinels know the master by.
const MASTER: &str = "mymaster";

/// Private servers and Sentinels; the first server begins as the master.
#[derive(Clone, Debug)]
pub struct RedisSentinels {
    servers: Vec<Redis>,
    sentinels: Vec<Redis>,
}

impl RedisSentinels {
    /// A master with this many replicas, all set up so. A master that does not answer for a second is replaced.
    ///
    /// # Panics
    /// When it does not come about.
    pub async fn start(options: &RedisOptions, replicas: usize) -> Self {
        let master = options.clone().start().await;
        let follow = format!("replicaof 127.0.0.1 {}", master.port());
        let mut servers = vec![master.clone()];
        for _ in 0..replicas {
            servers.push(options.clone().setting(&follow).start().await);
        }
        let mut sentinels = Vec::new();
        for _ in 0..3 {
            let watch = RedisOptions { part: Part::Sentinel, ..RedisOptions::default() }
                .setting(&format!("sentinel monitor {MASTER} 127.0.0.1 {} 2", master.port()))
                .setting(&format!("sentinel down-after-milliseconds {MASTER} 1000"))
                .setting(&format!("sentinel failover-timeout {MASTER} 5000"));
            sentinels.push(watch.start().await);
        }
        let all = Self { servers, sentinels };
        for sentinel in &all.sentinels {
            wait_for("the Sentinels know each other and the replicas", async || {
                let known = sentinel.cli(["sentinel", "master", MASTER]).await;
                let field = |name: &str| {
                    let mut lines = known.lines().skip_while(|line| *line != name);
                    lines.nth(1).and_then(|value| value.parse::<usize>().ok())
                };
                let known = field("num-slaves") == Some(replicas) && field("num-other-sentinels") == Some(2);
                known.then_some(())
            })
            .await;
        }
        wait_for("the replicas are in step", async || {
            let wanted = replicas.to_string();
            (master.cli(["wait", &wanted, "100"]).await == wanted).then_some(())
        })
        .await;
        all
    }

    /// A server by its number.
    pub fn server(&self, n: usize) -> &Redis {
        &self.servers[n]
    }

    /// The Sentinels.
    pub fn sentinels(&self) -> &[Redis] {
        &self.sentinels
    }

    /// The URL of the master, by its name.
    pub fn url(&self) -> String {
        let sentinels: Vec<_> = self.sentinels.iter().map(|sentinel| sentinel.addr().to_string()).collect();
        format!("redis+sentinel://{}/{MASTER}", sentinels.join(","))
    }

    /// Waits until another server than `old` is the master, and answers its number.
    ///
    /// # Panics
    /// When that does not come about.
    pub async fn failed_over(&self, old: usize) -> usize {
        let old = self.servers[old].port();
        let port = wait_for("the Sentinels have a new master", async || {
            let told = self.sentinels[0].cli(["sentinel", "get-master-addr-by-name", MASTER]).await;
            let port = told.lines().nth(1)?.parse::<u16>().ok()?;
            (port != old).then_some(port)
        })
        .await;
        let new = self.servers.iter().position(|server| server.port() == port).expect("one of the servers");
        wait_for("it is the master", async || {
            self.servers[new].cli(["role"]).await.starts_with("master").then_some(())
        })
        .await;
        new
    }
}
