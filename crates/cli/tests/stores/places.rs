//! The stores, each fresh and empty.

use std::any::Any;
use std::path::Path;

use tempfile::TempDir;
use testkit::{FaultProxy, Mariadb, Postgres, Redis, RedisCluster, Upstream};

use crate::common::{Gateway, run};

/// A store of one test.
pub(crate) struct Place {
    /// What `--store` is given.
    pub(crate) url: String,
    folder: TempDir,
    network: Option<FaultProxy>,
    _server: Option<Box<dyn Any + Send + Sync>>,
}

impl Place {
    fn at(url: impl FnOnce(&Path) -> String) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = url(folder.path());
        Self { url, folder, network: None, _server: None }
    }

    fn behind(network: FaultProxy, url: String, server: impl Any + Send + Sync) -> Self {
        Self { network: Some(network), _server: Some(Box::new(server)), ..Self::at(|_| url) }
    }

    pub(crate) async fn sqlite() -> Self {
        Self::at(|folder| format!("sqlite:{}", folder.join("onlyonce.db").display()))
    }

    pub(crate) async fn memory() -> Self {
        Self::at(|_| "memory:".into())
    }

    pub(crate) async fn postgres() -> Self {
        let server = Postgres::shared().await;
        let database = server.database().await;
        let network = FaultProxy::start(server.addr()).await;
        let url = format!("postgres://postgres@{}/{database}", network.addr());
        Self::behind(network, url, server)
    }

    pub(crate) async fn mysql() -> Self {
        let server = Mariadb::shared().await;
        let database = server.database().await;
        let network = FaultProxy::start(server.addr()).await;
        let url = format!("mysql://root@{}/{database}", network.addr());
        Self::behind(network, url, server)
    }

    pub(crate) async fn redis() -> Self {
        let server = Redis::options().durable().start().await;
        let network = FaultProxy::start(server.addr()).await;
        let url = format!("redis://{}", network.addr());
        Self::behind(network, url, server)
    }

    /// On a cluster that other lines use too, one after another: it is emptied first.
    pub(crate) async fn cluster(cluster: &RedisCluster) -> Self {
        cluster.flush().await;
        Self::at(|_| cluster.url())
    }

    /// The network between the gateways and the store.
    pub(crate) fn network(&self) -> &FaultProxy {
        self.network.as_ref().expect("a store behind a network")
    }

    /// A gateway on this store.
    pub(crate) async fn gateway(&self, upstream: &Upstream, more: &[&str]) -> Gateway {
        let args = [&["--store", &self.url], more].concat();
        Gateway::start(&upstream.url(), self.folder.path(), &args).await
    }

    /// `onlyonce keys …` on this store: success, and what it wrote.
    pub(crate) async fn keys(&self, args: &[&str]) -> (bool, String) {
        run(&[&["keys"], args, &["--store", &self.url]].concat()).await
    }
}
