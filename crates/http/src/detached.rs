//! Work that no client can cancel.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::FutureExt;
use onlyonce_core::{Mutant, mutant};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Runs in the task of its caller for as long as that waits for the answer, which spares a task and its wake-ups. When
/// the answer is there before the end, or the caller goes away, the rest runs in a task of its own.
pub(crate) struct Detached<T> {
    rest: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    answer: oneshot::Receiver<T>,
    runtime: Handle,
}

impl<T> Detached<T> {
    /// `work` sends its answer to `answer` at some time.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub(crate) fn new(work: impl Future<Output = ()> + Send + 'static, answer: oneshot::Receiver<T>) -> Self {
        // A panic ends the work, as it would end a task, and not the connection.
        let work = AssertUnwindSafe(work).catch_unwind().map(drop);
        Self { rest: Some(Box::pin(work)), answer, runtime: Handle::current() }
    }

    fn detach(&mut self) {
        if let Some(rest) = self.rest.take() {
            self.runtime.spawn(rest);
        }
    }
}

impl<T> Future for Detached<T> {
    /// `None` when the work ended without an answer.
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        if let Some(rest) = &mut self.rest
            && rest.as_mut().poll(cx).is_ready()
        {
            self.rest = None;
        }
        let answer = ready!(self.answer.poll_unpin(cx));
        self.detach();
        Poll::Ready(answer.ok())
    }
}

impl<T> Drop for Detached<T> {
    fn drop(&mut self) {
        if mutant(Mutant::ReleaseOnDisconnect) {
            self.rest = None;
        }
        self.detach();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    fn work() -> (Detached<&'static str>, Arc<Semaphore>, Arc<Semaphore>) {
        let (go, done) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let (to, answer) = oneshot::channel();
        let (gate, end) = (go.clone(), done.clone());
        let work = async move {
            gate.acquire().await.unwrap().forget();
            let _ = to.send("answer");
            gate.acquire().await.unwrap().forget();
            end.add_permits(1);
        };
        (Detached::new(work, answer), go, done)
    }

    #[tokio::test]
    async fn it_goes_on_when_the_caller_goes_away() {
        let (mut detached, go, done) = work();
        assert!((&mut detached).now_or_never().is_none());
        drop(detached);
        go.add_permits(2);
        testkit::within("the rest", done.acquire()).await.unwrap().forget();
    }

    #[tokio::test]
    async fn it_goes_on_when_it_was_never_polled_or_is_dropped_outside_the_runtime() {
        let (detached, go, done) = work();
        std::thread::spawn(move || drop(detached)).join().unwrap();
        go.add_permits(2);
        testkit::within("the rest", done.acquire()).await.unwrap().forget();
    }

    #[tokio::test]
    async fn the_answer_does_not_wait_for_the_end() {
        let (detached, go, done) = work();
        go.add_permits(1);
        assert_eq!(testkit::within("the answer", detached).await, Some("answer"));
        assert_eq!(done.available_permits(), 0);
        go.add_permits(1);
        testkit::within("the rest", done.acquire()).await.unwrap().forget();
    }

    #[tokio::test]
    async fn a_panic_is_an_end_without_an_answer() {
        let (to, answer) = oneshot::channel::<()>();
        let work = async move {
            let _to = to;
            panic!("on purpose");
        };
        assert_eq!(testkit::within("the end", Detached::new(work, answer)).await, None);
    }
}
