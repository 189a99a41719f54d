//! The store as gateways see it: behind a network, and none of their calls can be taken back.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, LeaseToken, MemoryStore,
    Operation, PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Store, StoreError, StoreErrorKind,
};
use tokio::sync::oneshot;

use crate::network::{Back, Fate, Network};

type Applied<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// One gateway's way to the store.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) network: Network,
    pub(crate) link: usize,
    pub(crate) store: MemoryStore,
}

impl Remote {
    async fn call<T: Send + 'static>(
        &self,
        what: &'static str,
        apply: impl FnOnce(MemoryStore) -> Applied<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (there_ms, back) = match self.network.fate(self.link) {
            Fate::Refused => return Err(StoreError::new(StoreErrorKind::Unavailable, what)),
            Fate::Swallowed => return std::future::pending().await,
            Fate::Carried { there_ms, back } => (there_ms, back),
        };
        let (to, answer) = oneshot::channel();
        let (store, network) = (self.store.clone(), self.network.clone());
        let arrive = move |result: Result<T, StoreError>, network: &Network| match back {
            Back::Arrives { after_ms } => network.after(after_ms, Box::new(move |_| drop(to.send(result)))),
            Back::Breaks { after_ms } => network.after(after_ms, Box::new(move |_| drop(to))),
            Back::Never => network.lose(to),
        };
        let at_store = network.clone();
        let call = Box::new(move |_: &mut [_]| work_on(apply(store), &network, arrive));
        at_store.after(there_ms, call);
        answer.await.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::Unavailable, what).ambiguous()))
    }
}

/// The store works at once, or a millisecond later where it dawdles.
fn work_on<T: Send + 'static>(
    mut work: Applied<T>,
    network: &Network,
    arrive: impl FnOnce(Result<T, StoreError>, &Network) + Send + 'static,
) {
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => arrive(result, network),
        Poll::Pending => {
            let its = network.clone();
            network.after(1, Box::new(move |_| work_on(work, &its, arrive)));
        }
    }
}

#[async_trait]
impl Store for Remote {
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let (operation, request) = (operation.clone(), request.clone());
        self.call("claim", |store| Box::pin(async move { store.claim(&operation, &request).await })).await
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        let operation = operation.clone();
        self.call("renew", move |store| Box::pin(async move { store.renew(&operation, token, lease).await }))
            .await
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let (operation, completion) = (operation.clone(), completion.clone());
        self.call("complete", |store| Box::pin(async move { store.complete(&operation, &completion).await }))
            .await
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        let operation = operation.clone();
        self.call("release", move |store| Box::pin(async move { store.release(&operation, token).await }))
            .await
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        let operation = operation.clone();
        self.call("mark_unknown", move |store| {
            Box::pin(async move { store.mark_unknown(&operation, token).await })
        })
        .await
    }

    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        let (request, network) = (*request, self.network.clone());
        self.call("purge", move |store| {
            Box::pin(async move {
                let purged = store.purge(&request).await;
                network.note_purged(purged.as_ref().map_or(0, |purged| purged.removed));
                purged
            })
        })
        .await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { network: true, ..self.store.capabilities() }
    }
}
