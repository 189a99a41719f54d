//! The right server's idempotency: a table in memory, one lock around it. What a defect changes is said at its place.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::defect::Defect;
use crate::gauge::Gauge;
use crate::key::Id;
use crate::ledger::{Journal, Ledger, Order, Takes, paid, receipt};
use crate::nature::{Breed, Nature};
use crate::replay::{changed, marked, with_balance};
use crate::wire::Reply;

/// Between the look-up and the insert of who checks, then inserts.
const GAP: Duration = Duration::from_millis(200);
/// The lock that is too short for the work.
const SHORT_LOCK: Duration = Duration::from_millis(900);
/// The lock that hides a result.
const LONG_LOCK: Duration = Duration::from_secs(6);
const FEW: usize = 8;
const PER_SECOND: usize = 50;
/// Of so many requests one comes while nothing is served.
const STANDS_STILL_EVERY: usize = 11;
/// How late an effect is seen.
const LAG: Duration = Duration::from_millis(60);
/// What the slow one adds to everything.
const SLOW: Duration = Duration::from_millis(250);

/// Payments and keys.
#[derive(Debug)]
pub(crate) struct Shop {
    nature: Nature,
    state: Mutex<State>,
    /// Requests that came, those whose connection waits for an answer, those whose work runs, and those that wait for another's.
    pub(crate) begun: Gauge,
    pub(crate) open: Gauge,
    pub(crate) running: Gauge,
    pub(crate) waiting: Gauge,
    gate: Semaphore,
}

#[derive(Debug, Default)]
struct State {
    ledger: Ledger,
    keys: HashMap<Id, Entry>,
    recent: VecDeque<Id>,
    asked: usize,
    /// Orders that fail once and have failed.
    failed_once: HashMap<Id, bool>,
    /// Order numbers, with the key that each came with.
    numbers: HashMap<String, Id>,
    journal: Option<Journal>,
    next_token: u64,
    /// In the last second.
    admitted: VecDeque<Instant>,
}

#[derive(Clone, Debug)]
struct Entry {
    fingerprint: Vec<u8>,
    token: u64,
    since: Instant,
    progress: Progress,
}

#[derive(Clone, Debug)]
enum Progress {
    Running,
    Done(Reply),
}

/// A request with its key.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) id: Id,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) path: String,
    pub(crate) body: Bytes,
}

enum Claim {
    Won(u64),
    Running,
    Mismatch,
    Done(Reply),
    /// A crash took what was known.
    Unknown,
    /// Waited, and then did not look.
    Waited,
    Violation,
}

impl Shop {
    pub(crate) fn new(nature: Nature) -> Self {
        let (begun, open, running, waiting) = Default::default();
        Self { nature, state: Mutex::default(), begun, open, running, waiting, gate: Semaphore::new(0) }
    }

    /// With what the journal says.
    pub(crate) fn recover(nature: Nature, journal: &Path) -> Self {
        let shop = Self::new(nature);
        let (journal, lines) = Journal::open(journal);
        let mut state = shop.state.lock();
        for line in lines {
            if let Some(amount) = line["paid"].as_u64() {
                state.ledger.pay(amount);
            }
            let Some(key) = line["key"].as_str() else { continue };
            let text = |name: &str| line[name].as_str().expect("a text").to_owned();
            let id = Id { scope: text("scope"), key: key.to_owned() };
            let progress = match line["reply"].is_null() {
                true => Progress::Running,
                false => Progress::Done(Reply::from_json(&line["reply"])),
            };
            let since = Instant::now();
            state.keys.insert(
                id,
                Entry {
                    fingerprint: serde_json::from_value(line["fingerprint"].clone()).expect("bytes"),
                    token: 0,
                    since,
                    progress,
                },
            );
        }
        state.journal = Some(journal);
        drop(state);
        shop
    }

    fn has(&self, defect: Defect) -> bool {
        self.nature.has(defect)
    }

    fn is(&self, breed: Breed) -> bool {
        self.nature.is(breed)
    }

    /// How many payments there were.
    pub(crate) fn count(&self) -> u64 {
        self.state.lock().ledger.count()
    }

    /// For who asks from outside.
    pub(crate) fn effects(&self) -> Value {
        let state = self.state.lock();
        let lag = if self.is(Breed::LateEffect) { LAG } else { Duration::ZERO };
        let (count, balance) = state.ledger.before(Instant::now() - lag);
        json!({"count": count, "balance": balance})
    }

    /// Answers one call: by the work, or by what is known of its key.
    pub(crate) async fn answer(self: &Arc<Self>, call: &Call) -> Reply {
        let claim = self.claim(call).await;
        let claim = match claim {
            Claim::Running if self.is(Breed::Waits) || self.has(Defect::WaiterGetsEmpty) => {
                self.wait(call).await
            }
            claim => claim,
        };
        match claim {
            Claim::Won(token) => {
                let reply = if self.is(Breed::Accepts) {
                    self.accept(call, token)
                } else {
                    self.run(call, token).await
                };
                let first = if self.has(Defect::MarkerOnFirst) { marked(reply) } else { reply };
                self.with_expiry(first)
            }
            Claim::Running => self.refuse(
                if self.is(Breed::TooEarly) { 425 } else { 409 },
                "in-progress",
                "A request with this key is being worked on; try again later.",
            ),
            Claim::Mismatch => {
                let status = match self.nature {
                    nature if nature.has(Defect::MismatchIs409) => 409,
                    nature if nature.is(Breed::Stripe) => 400,
                    _ => 422,
                };
                self.refuse(status, "key-reused", "This key was used for another request.")
            }
            Claim::Done(reply) => self.replay(call, reply).await,
            Claim::Unknown => {
                let problem =
                    r#"{"title":"unknown","status":409,"code":"outcome-unknown","retryable":false}"#;
                Reply::new(409, problem).header("content-type", "application/problem+json")
            }
            Claim::Waited => Reply::new(200, ""),
            Claim::Violation => Reply::new(500, "UNIQUE constraint failed: idempotency_keys.key"),
        }
    }

    fn refuse(&self, status: u16, code: &str, detail: &str) -> Reply {
        let refusal = self.refusal(Reply::problem(status, code, detail));
        if code == "in-progress" && !self.has(Defect::NoRetryAfter) && !self.is(Breed::Terse) {
            return refusal.header("retry-after", "1");
        }
        refusal
    }

    /// A refusal that concerns keys.
    pub(crate) fn refusal(&self, refusal: Reply) -> Reply {
        if self.has(Defect::PlainRefusals) || self.is(Breed::Terse) {
            let text = "Bad idempotency key";
            return Reply { body: text.into(), ..refusal }
                .without("content-type")
                .header("content-type", "text/plain");
        }
        if self.has(Defect::NoLinks) { refusal.without("link") } else { refusal }
    }

    fn with_expiry(&self, reply: Reply) -> Reply {
        if self.has(Defect::NoExpiry) || self.is(Breed::Terse) {
            return reply;
        }
        reply.header("idempotency-key-expires", "Fri, 31 Dec 2100 23:59:59 GMT")
    }

    /// Work without a key.
    pub(crate) async fn unguarded(&self, path: &str, body: &Bytes) -> Reply {
        let _running = self.running.enter();
        let order = match Order::parse(body) {
            Ok(order) => order,
            Err(refusal) => return refusal,
        };
        self.work(&order).await;
        self.pay(&mut self.state.lock(), &order, path)
    }

    /// Whether there was room for one more request in this second.
    pub(crate) fn has_a_place(&self) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.admitted.retain(|then| now - *then < Duration::from_secs(1));
        let has = state.admitted.len() < PER_SECOND;
        if has {
            state.admitted.push_back(now);
        }
        has
    }

    /// Whether this request comes at a moment at which nothing is served.
    pub(crate) fn stands_still(&self) -> bool {
        let mut state = self.state.lock();
        state.asked += 1;
        state.asked.is_multiple_of(STANDS_STILL_EVERY)
    }

    /// Lets the work end that waits at the gate, now and later.
    pub(crate) fn open_gate(&self) {
        self.gate.close();
    }

    async fn work(&self, order: &Order) {
        match order.takes {
            Takes::Time(time) if self.is(Breed::Slow) => tokio::time::sleep(time + SLOW).await,
            Takes::Time(time) => tokio::time::sleep(time).await,
            // Closed means open: nobody has to wait any more.
            Takes::Gate => assert!(self.gate.acquire().await.is_err()),
        }
    }

    async fn claim(&self, call: &Call) -> Claim {
        if self.has(Defect::CheckThenInsert) || self.has(Defect::LosersGet500) {
            if let Some(known) = self.look_up(&mut self.state.lock(), call) {
                return known;
            }
            tokio::time::sleep(GAP).await;
            let mut state = self.state.lock();
            if self.has(Defect::LosersGet500) && state.keys.contains_key(&call.id) {
                return Claim::Violation;
            }
            return Claim::Won(self.insert(&mut state, call));
        }
        let mut state = self.state.lock();
        match self.look_up(&mut state, call) {
            Some(known) => known,
            None => Claim::Won(self.insert(&mut state, call)),
        }
    }

    /// What is known of a key; `None` for nothing.
    fn look_up(&self, state: &mut State, call: &Call) -> Option<Claim> {
        let entry = match state.keys.get(&call.id) {
            Some(entry) => entry.clone(),
            None if self.has(Defect::OneLockForAll) && self.running.get() > 0 => return Some(Claim::Running),
            None => return None,
        };
        let running = matches!(entry.progress, Progress::Running);
        if running && entry.token == 0 && self.is(Breed::UnknownAfterCrash) {
            return Some(Claim::Unknown);
        }
        if self.has(Defect::LockHidesResult) && entry.since.elapsed() < LONG_LOCK && entry.token != 0 {
            return Some(Claim::Running);
        }
        // Claimed by the head of a request, whose body has yet to come.
        let early = self.has(Defect::StuckAfterHalf) && entry.fingerprint.is_empty();
        if entry.fingerprint != call.fingerprint && !early && !(running && self.has(Defect::InFlightFirst)) {
            return self.mismatch(state, call);
        }
        if running {
            return self.in_progress(state, call, &entry);
        }
        let Progress::Done(reply) = entry.progress else { return None };
        if self.has(Defect::EverySecondRuns) {
            state.keys.remove(&call.id);
        }
        Some(Claim::Done(reply))
    }

    fn mismatch(&self, state: &mut State, call: &Call) -> Option<Claim> {
        let entry = state.keys.get_mut(&call.id)?;
        if self.has(Defect::MismatchRuns) {
            return None;
        }
        let running = matches!(entry.progress, Progress::Running);
        if self.has(Defect::MismatchPoisons) && !running {
            entry.progress =
                Progress::Done(self.refuse(422, "key-reused", "This key was used for another request."));
        }
        if self.has(Defect::MismatchFrees) && !running {
            state.keys.remove(&call.id);
        }
        Some(Claim::Mismatch)
    }

    fn in_progress(&self, state: &mut State, call: &Call, entry: &Entry) -> Option<Claim> {
        if self.has(Defect::NoClaim) || (self.has(Defect::LockTooShort) && entry.since.elapsed() > SHORT_LOCK)
        {
            return None;
        }
        if self.has(Defect::RefusedDuplicateFrees) {
            state.keys.remove(&call.id);
        }
        Some(Claim::Running)
    }

    /// Writes the claim; the lock is held by the caller since the look-up, unless a defect says otherwise.
    fn insert(&self, state: &mut State, call: &Call) -> u64 {
        state.next_token += 1;
        let token = state.next_token;
        if self.has(Defect::StuckAfterCrash) || self.is(Breed::UnknownAfterCrash) {
            self.write(
                state,
                &json!({"key": call.id.key, "scope": call.id.scope, "fingerprint": call.fingerprint}),
            );
        }
        let entry = Entry {
            fingerprint: call.fingerprint.clone(),
            token,
            since: Instant::now(),
            progress: Progress::Running,
        };
        state.keys.insert(call.id.clone(), entry);
        state.recent.push_back(call.id.clone());
        if self.has(Defect::FewKeys) && state.recent.len() > FEW {
            let oldest = state.recent.pop_front();
            oldest.map(|id| state.keys.remove(&id));
        }
        token
    }

    /// Runs the work and records how it ended.
    async fn run(&self, call: &Call, token: u64) -> Reply {
        let _running = self.running.enter();
        let order = match Order::parse(&call.body) {
            Ok(order) => order,
            Err(refusal) => return self.finish(&mut self.state.lock(), call, token, refusal, None),
        };
        if let (true, Some(number)) = (self.is(Breed::UniqueOrders), &order.number) {
            let mut state = self.state.lock();
            let owner = state.numbers.entry(number.clone()).or_insert_with(|| call.id.clone());
            if *owner != call.id {
                let taken = Reply::problem(422, "order-taken", "There is an order with this number.");
                return self.finish(&mut state, call, token, taken, None);
            }
        }
        let pays_first = self.has(Defect::RunsAgainAfterCrash)
            || self.has(Defect::RunsAgainAfterDisconnect)
            || self.is(Breed::UnknownAfterCrash);
        let early =
            (pays_first && !order.flaky).then(|| self.pay(&mut self.state.lock(), &order, &call.path));
        let _freed = FreeOnDrop { shop: self, call };
        self.work(&order).await;
        let mut state = self.state.lock();
        if order.flaky && !std::mem::replace(state.failed_once.entry(call.id.clone()).or_default(), true) {
            let reply = Reply::problem(503, "bank-unreachable", "The bank does not answer.")
                .header("retry-after", "1");
            return self.finish(&mut state, call, token, reply, None);
        }
        match early {
            Some(reply) => self.finish(&mut state, call, token, reply, None),
            None => {
                let reply = self.pay_unwritten(&mut state, &order, &call.path);
                self.finish(&mut state, call, token, reply, Some(order.amount))
            }
        }
    }

    fn pay(&self, state: &mut State, order: &Order, path: &str) -> Reply {
        let reply = self.pay_unwritten(state, order, path);
        self.write(state, &paid(order.amount));
        reply
    }

    fn pay_unwritten(&self, state: &mut State, order: &Order, path: &str) -> Reply {
        let id = state.ledger.pay(order.amount);
        receipt(order, id, state.ledger.balance(), path, self.nature)
    }

    fn write(&self, state: &mut State, line: &Value) {
        if let Some(journal) = &mut state.journal {
            journal.append(line);
        }
    }

    /// Payment and record are one line of the journal, so that neither is there without the other.
    fn finish(&self, state: &mut State, call: &Call, token: u64, reply: Reply, amount: Option<u64>) -> Reply {
        let transient = reply.status >= 500;
        let big = self.has(Defect::BigAnswerNotStored) && reply.body.len() > 64 << 10;
        let refused = self.has(Defect::FourxxNotStored) && (400..500).contains(&reply.status);
        let stores_5xx = self.has(Defect::FivexxStored) || self.is(Breed::Stripe);
        let freed = big || refused || transient && !stores_5xx;
        let mut line = amount.map_or(json!({}), paid);
        if !freed && !self.has(Defect::ForgetsOnRestart) {
            line["key"] = call.id.key.as_str().into();
            line["scope"] = call.id.scope.as_str().into();
            line["fingerprint"] = call.fingerprint.as_slice().into();
            line["reply"] = reply.to_json();
        }
        self.write(state, &line);
        let Some(entry) = state.keys.get_mut(&call.id).filter(|entry| entry.token == token) else {
            return reply;
        };
        if !freed {
            entry.progress = Progress::Done(reply.clone());
        } else if !(transient && self.has(Defect::LockOutlivesWork)) {
            state.keys.remove(&call.id);
        }
        reply
    }

    async fn replay(&self, call: &Call, stored: Reply) -> Reply {
        let mut reply = stored.clone();
        if !self.has(Defect::SetCookieReplayed) {
            reply = reply.without("set-cookie");
        }
        match self.nature.defect {
            Some(Defect::ReplayRuns) => {
                self.unguarded(&call.path, &call.body).await;
            }
            Some(Defect::ReplayOfNow) => reply = with_balance(reply, self.state.lock().ledger.balance()),
            _ => {}
        }
        reply = changed(reply, self.nature);
        let reply = self.with_expiry(reply);
        match self.nature {
            nature if nature.has(Defect::NoMarker) || nature.is(Breed::Terse) => reply,
            nature if nature.is(Breed::Stripe) => reply.header("idempotent-replayed", "true"),
            _ => marked(reply),
        }
    }

    /// Asks again and again until the key is not in flight.
    async fn wait(&self, call: &Call) -> Claim {
        let _waiting = self.waiting.enter();
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            match self.claim(call).await {
                Claim::Running => {}
                Claim::Done(_) if self.has(Defect::WaiterGetsEmpty) => return Claim::Waited,
                claim => return claim,
            }
        }
    }

    /// Takes the order now, and pays later.
    fn accept(self: &Arc<Self>, call: &Call, token: u64) -> Reply {
        let order = match Order::parse(&call.body) {
            Ok(order) => order,
            Err(refusal) => return self.finish(&mut self.state.lock(), call, token, refusal, None),
        };
        let reply = Reply::new(202, r#"{"status":"pending"}"#)
            .header("content-type", "application/json")
            .header("location", &format!("/orders/{token}"));
        let (shop, path) = (self.clone(), call.path.clone());
        tokio::spawn(async move {
            shop.work(&order).await;
            shop.pay(&mut shop.state.lock(), &order, &path);
        });
        self.finish(&mut self.state.lock(), call, token, reply, None)
    }

    /// Claims for a request whose body has not come; `None` when the key is known.
    pub(crate) fn claim_early(&self, call: &Call) -> Option<u64> {
        let mut state = self.state.lock();
        if state.keys.contains_key(&call.id) { None } else { Some(self.insert(&mut state, call)) }
    }

    /// Runs what was claimed early.
    pub(crate) async fn run_early(&self, call: &Call, token: u64) -> Reply {
        if let Some(entry) = self.state.lock().keys.get_mut(&call.id) {
            entry.fingerprint.clone_from(&call.fingerprint);
        }
        self.with_expiry(self.run(call, token).await)
    }
}

/// Frees the key when the work is dropped in the middle.
struct FreeOnDrop<'a> {
    shop: &'a Shop,
    call: &'a Call,
}

impl Drop for FreeOnDrop<'_> {
    fn drop(&mut self) {
        if self.shop.has(Defect::RunsAgainAfterDisconnect) || self.shop.is(Breed::Cancels) {
            let mut state = self.shop.state.lock();
            if matches!(state.keys.get(&self.call.id), Some(Entry { progress: Progress::Running, .. })) {
                state.keys.remove(&self.call.id);
            }
        }
    }
}
