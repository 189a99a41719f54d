//! A cluster of six on one wall clock that is told, shared by the tests of a run, one of them at a time.

use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use onlyonce_prove::quiet_port;
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

use super::told::ToldClock;
use super::{blocking, run_cli};
use crate::service::{self, Home, Recipe, Service, program};

const SCRIPT: &str = include_str!("cluster.sh");

/// A whole cluster, emptied, for as long as this is held.
#[derive(Debug)]
pub struct ToldCluster {
    service: Service<Six>,
    clock: ToldClock,
    _turn: File,
}

#[derive(Debug)]
struct Six;

impl ToldCluster {
    /// Waits for its turn. The clock stands still, at the present moment.
    ///
    /// # Panics
    /// With the reason when the cluster cannot be started.
    pub async fn take() -> Self {
        blocking(|| {
            let turn = File::create(service::root()?.join("told-cluster.turn"))?;
            flock(&turn, FlockOperation::LockExclusive)?;
            let service = Service::shared(Six)?;
            let clock = ToldClock::at(service.home().path("clock"))?;
            clock.stop();
            for port in ports(service.home())? {
                let master = run_cli(service.home(), port, &["role"])?.starts_with("master");
                if master {
                    run_cli(service.home(), port, &["flushall"])?;
                }
            }
            Ok(Self { service, clock, _turn: turn })
        })
        .await
    }

    /// A URL with every node.
    ///
    /// # Panics
    /// When it is not known.
    pub fn url(&self) -> String {
        let ports = ports(self.service.home()).expect("its ports are noted");
        let nodes: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis+cluster://{}", nodes.join(","))
    }

    /// The wall clock of all six.
    pub fn clock(&self) -> &ToldClock {
        &self.clock
    }
}

impl Recipe for Six {
    fn name(&self) -> &'static str {
        "redis-told-cluster"
    }

    fn prepare(&self, home: &Home) -> Result<()> {
        let clock = home.write("clock", 0_i64.to_ne_bytes())?;
        // So that a missing compiler is told here, with its reason.
        ToldClock::preload(&mut Command::new("redis-server"), &clock)?;
        home.write("cluster.sh", SCRIPT)?;
        let mut ports = String::new();
        for _ in 0..6 {
            // The bus is told its port; all twelve are told apart.
            let [port, bus] = [quiet_port()?, quiet_port()?];
            let folder = home.path(&port.to_string());
            std::fs::create_dir(&folder)?;
            let name = format!("{port}/redis.conf");
            // Time jumps by years here: no node and no replica is given up for that.
            home.write(
                &name,
                format!(
                    "bind 127.0.0.1\nport {port}\ndir {}\nsave \"\"\nappendonly no\nrepl-diskless-sync-delay 0\n\
                     cluster-enabled yes\ncluster-port {bus}\ncluster-node-timeout 9000000000000\n\
                     repl-timeout 2000000000\n",
                    folder.display()
                ),
            )?;
            home.write(&format!("{port}/bus-port"), bus.to_string())?;
            let _ = writeln!(ports, "{port}");
        }
        home.write("ports", ports)?;
        Ok(())
    }

    fn command(&self, home: &Home) -> Command {
        let find = |name: &str| program(name, &[]).unwrap_or_else(|_| PathBuf::from(name));
        let mut command = home.command("sh");
        command.arg(home.path("cluster.sh")).arg(home.folder());
        command.arg(find("redis-server")).arg(find("redis-cli"));
        command.args(ports(home).unwrap_or_default().iter().map(u16::to_string));
        let _ = ToldClock::preload(&mut command, &home.path("clock"));
        command
    }

    fn is_ready(&self, home: &Home) -> bool {
        home.path("formed").exists()
            && ports(home).is_ok_and(|ports| {
                ports.iter().all(|port| {
                    run_cli(home, *port, &["cluster", "info"])
                        .is_ok_and(|info| info.contains("cluster_state:ok"))
                })
            })
    }

    // The script ends its servers.
    fn end_signal(&self) -> Signal {
        Signal::TERM
    }
}

fn ports(home: &Home) -> Result<Vec<u16>> {
    std::fs::read_to_string(home.path("ports"))?.lines().map(|port| Ok(port.parse()?)).collect()
}
