//! What every trial works with: requests, keys, and the effect watched before and after.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use parking_lot::Mutex;

use crate::clock;
use crate::effect::{Amount, Probe};
use crate::options::{KeyStyle, Options};
use crate::profile::Profile;
use crate::seen::{Effects, Parts};
use crate::stop::{Step, Stop};
use crate::story::{self, Story};
use crate::trials::Cache;
use crate::wire::{Answer, Armed, Begun, Budget, Call, NoAnswer, Until, Wire};

/// Which of the given bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    Main,
    Other,
    Slow,
    Failing,
    Transient,
}

impl Payload {
    fn option(self) -> &'static str {
        match self {
            Self::Main => "--body",
            Self::Other => "--other-body",
            Self::Slow => "--slow-body",
            Self::Failing => "--failing-body",
            Self::Transient => "--transient-body",
        }
    }
}

/// One logical operation: what is the same in all its requests.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    /// Stands for `{{unique}}` in the request; its key may have been made of another one.
    unique: String,
    /// The lines of the key header; none is a request without a key.
    lines: Vec<Vec<u8>>,
}

impl Op {
    /// The same key with a request of its own, where requests have something that may be used once.
    pub(crate) fn with_another_request(self) -> Self {
        Self { unique: uuid(), lines: self.lines }
    }

    /// A text with `{{unique}}` replaced.
    pub(crate) fn fill(&self, text: &str) -> String {
        text.replace(UNIQUE, &self.unique)
    }
}

/// What is known of a body that ran once under a fresh key.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) answer: Answer,
    /// What one run moves the effect by; none when it cannot be seen.
    pub(crate) unit: Option<Amount>,
}

/// What the baseline found.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Keys are written bare.
    pub(crate) bare: bool,
    /// In what the answers of two runs differ.
    pub(crate) differs: Parts,
    /// What of an answer is not the same in its replay: said once, and no sign of a run in other scenarios.
    pub(crate) lost: Parts,
    /// What one run moves the effect by.
    pub(crate) unit: Option<Amount>,
    /// How long the effect takes to show after the answer.
    pub(crate) lag: Duration,
}

impl Facts {
    fn new(bare: bool) -> Self {
        Self { bare, differs: Parts::NONE, lost: Parts::NONE, unit: None, lag: Duration::ZERO }
    }

    /// Whether each run makes another answer, in what replays keep.
    pub(crate) fn tells(&self) -> bool {
        self.differs.without(self.lost) != Parts::NONE
    }

    /// Whether two answers are of one run, as far as answers tell.
    pub(crate) fn same_run(&self, one: &Answer, other: &Answer) -> bool {
        Parts::ALL.without(Parts::alike(one, other)).without(self.lost) == Parts::NONE
    }

    /// Whether two answers are alike in something in which those of two runs differ.
    pub(crate) fn has_sign_of_same_run(&self, one: &Answer, other: &Answer) -> bool {
        let unlike = Parts::ALL.without(Parts::alike(one, other));
        self.differs.without(unlike) != Parts::NONE
    }

    /// What a retry that did not run shows of replays.
    pub(crate) fn learn_replay(&mut self, first: &Answer, replay: &Answer) {
        self.lost = Parts::ALL.without(Parts::alike(first, replay));
    }
}

/// The effect as it was before something was tried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch(Option<Amount>);

/// The bench on which trials run, one after another.
pub(crate) struct Lab<'a> {
    pub(crate) options: &'a Options,
    pub(crate) wire: Wire,
    probe: Option<Probe>,
    facts: Mutex<Facts>,
    story: Mutex<Story>,
    last_sent: Mutex<Option<clock::Instant>>,
    measured: Mutex<Vec<(Payload, Measured)>>,
    pub(crate) cache: Cache,
}

impl<'a> Lab<'a> {
    pub(crate) fn new(options: &'a Options, wire: Wire, probe: Option<Probe>) -> Self {
        let facts = Facts::new(options.key_style == KeyStyle::Bare);
        Self {
            options,
            wire,
            probe,
            facts: Mutex::new(facts),
            story: Mutex::default(),
            last_sent: Mutex::default(),
            measured: Mutex::default(),
            cache: Cache::default(),
        }
    }

    pub(crate) fn budget(&self) -> &Budget {
        self.wire.budget()
    }

    pub(crate) fn profile(&self) -> Profile {
        self.options.profile
    }

    pub(crate) fn facts(&self) -> Facts {
        self.facts.lock().clone()
    }

    pub(crate) fn learn(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock());
    }

    // ---- keys and requests

    /// A fresh key.
    pub(crate) fn op(&self) -> Op {
        let unique = uuid();
        let line = if self.facts.lock().bare { unique.clone() } else { format!("\"{unique}\"") };
        Op { lines: vec![line.into_bytes()], unique }
    }

    /// A request that has no key.
    pub(crate) fn op_without_key(&self) -> Op {
        Op { unique: uuid(), lines: Vec::new() }
    }

    /// An operation whose key lines are given: one byte a character, `{{unique}}` replaced by `unique`.
    pub(crate) fn op_with_lines(&self, lines: &[String], unique: &str) -> Op {
        let lines = lines.iter().map(|line| latin1(&line.replace(UNIQUE, unique)));
        Op { unique: unique.to_owned(), lines: lines.collect() }
    }

    /// The request of an operation.
    ///
    /// # Errors
    /// When there is no such body.
    pub(crate) fn call(&self, payload: Payload, op: &Op) -> Step<Call> {
        let options = self.options;
        let body = match payload {
            Payload::Main => Some(&options.body),
            Payload::Other => options.other_body.as_ref(),
            Payload::Slow => options.slow_body.as_ref(),
            Payload::Failing => options.failing_body.as_ref(),
            Payload::Transient => options.transient_body.as_ref(),
        };
        let body = body.ok_or_else(|| Stop::Missing(format!("give {}", payload.option())))?;
        Ok(self.call_with(op.fill(body).into(), op))
    }

    /// The request of an operation with a body of its own.
    pub(crate) fn call_with(&self, body: Bytes, op: &Op) -> Call {
        let options = self.options;
        let mut headers: Vec<(String, Vec<u8>)> = Vec::new();
        for (name, value) in &options.headers {
            headers.push((name.clone(), op.fill(value).into_bytes()));
        }
        if !body.is_empty() && !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            headers.push(("Content-Type".into(), content_type(&body).into()));
        }
        for line in &op.lines {
            headers.push((options.key_header.clone(), line.clone()));
        }
        Call { method: options.method.clone(), target: op.fill(&options.url.path), headers, body }
    }

    /// The same request by the second principal.
    pub(crate) fn as_other_principal(&self, mut call: Call) -> Call {
        for (name, value) in &self.options.other_headers {
            call.headers.retain(|(given, _)| !given.eq_ignore_ascii_case(name));
            call.headers.push((name.clone(), value.clone().into_bytes()));
        }
        call
    }

    /// A method that is not the operation's own.
    pub(crate) fn other_method(&self) -> Method {
        let default = if self.options.method == Method::PATCH { Method::POST } else { Method::PATCH };
        self.options.other_method.clone().unwrap_or(default)
    }

    // ---- sending

    /// Sends a request that must be answered.
    pub(crate) async fn send(&self, call: &Call) -> Step<Answer> {
        Ok(self.try_send(call).await??)
    }

    /// Sends a request whose lack of an answer tells something.
    pub(crate) async fn try_send(&self, call: &Call) -> Step<Result<Answer, NoAnswer>> {
        const TRIES: u32 = 5;
        let mut outcome = self.send_silently(call).await?;
        for _ in 1..TRIES {
            let Some(pause) = outcome.as_ref().ok().and_then(Answer::slow_down) else { break };
            tokio::time::sleep(pause).await;
            outcome = self.send_silently(call).await?;
        }
        self.tell(story::call(call, &self.options.key_header), story::outcome(&outcome));
        Ok(outcome)
    }

    /// Sends a request once that must be answered, and may be told to come back later.
    pub(crate) async fn send_once(&self, call: &Call) -> Step<Answer> {
        let outcome = self.send_silently(call).await?;
        self.tell(story::call(call, &self.options.key_header), story::outcome(&outcome));
        Ok(outcome?)
    }

    /// Sends a request that is not told of, one of many.
    pub(crate) async fn send_silently(&self, call: &Call) -> Step<Result<Answer, NoAnswer>> {
        let outcome = self.wire.send(call).await;
        self.sent_now();
        Ok(outcome?)
    }

    fn sent_now(&self) {
        *self.last_sent.lock() = Some(clock::now());
    }

    pub(crate) async fn arm(&self, call: &Call) -> Step<Armed> {
        self.sent_now();
        Ok(self.wire.arm(call).await??)
    }

    pub(crate) async fn begin(&self, call: &Call, until: Until) -> Step<Begun> {
        let begun = self.wire.begin(call, until).await??;
        self.sent_now();
        let part = if until == Until::End { "" } else { ", half of it" };
        self.tell(
            format!("{}{part}", story::call(call, &self.options.key_header)),
            "(the client went away)".into(),
        );
        Ok(begun)
    }

    /// Sends the first request of a trial: when it is not accepted the trial has nothing to go on.
    pub(crate) async fn accepted(&self, call: &Call) -> Step<Answer> {
        let answer = self.send(call).await?;
        if answer.is_accepted() {
            return Ok(answer);
        }
        Err(Stop::Unfit(format!(
            "a fresh request was not accepted: it was answered {}",
            story::answer(&answer)
        )))
    }

    /// Sends until the answer is not "in progress", for `patience` at most; then the last answer is given.
    pub(crate) async fn settled(&self, call: &Call, patience: Duration) -> Step<Answer> {
        const PAUSE_MAX: Duration = Duration::from_secs(1);
        let start = clock::now();
        let mut pause = Duration::from_millis(50);
        let mut times = 0_u32;
        loop {
            let answer = self.send_silently(call).await??;
            times += 1;
            let waited = clock::now().saturating_duration_since(start);
            if !answer.is_in_progress() || waited >= patience {
                let again = if times > 1 {
                    format!("  (the {times}th try, after {waited:.1?})")
                } else {
                    String::new()
                };
                let sent = story::call(call, &self.options.key_header);
                self.tell(format!("{sent}{again}"), story::answer(&answer));
                return Ok(answer);
            }
            tokio::time::sleep(pause.min(patience.saturating_sub(waited))).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    // ---- the effect

    /// Begins to watch the effect, once that of what was sent before has had the time to show.
    pub(crate) async fn watch(&self) -> Step<Watch> {
        let Some(probe) = &self.probe else { return Ok(Watch(None)) };
        let last_sent = *self.last_sent.lock();
        if let Some(sent) = last_sent {
            let since = clock::now().saturating_duration_since(sent);
            let rest = (self.facts().lag * 2).saturating_sub(since);
            tokio::time::sleep(rest).await;
        }
        Ok(Watch(Some(probe.read().await?)))
    }

    /// How long it takes until an effect is seen; none when it does not come, or nobody looks.
    pub(crate) async fn arrival(&self, watch: Watch) -> Step<Option<Duration>> {
        self.arrival_within(watch, ARRIVAL_MAX).await
    }

    async fn arrival_within(&self, watch: Watch, max: Duration) -> Step<Option<Duration>> {
        let start = clock::now();
        let mut pause = Duration::from_millis(10);
        loop {
            let step = self.step_now(watch).await?;
            // The reading is in here: it may have been late itself.
            let waited = clock::now().saturating_duration_since(start);
            match step {
                None => return Ok(None),
                Some(step) if !step.is_zero() => return Ok(Some(waited)),
                Some(_) if waited >= max => return Ok(None),
                Some(_) => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// How far the effect moved at this moment.
    pub(crate) async fn step_now(&self, watch: Watch) -> Step<Option<Amount>> {
        match (watch, &self.probe) {
            (Watch(Some(before)), Some(probe)) => Ok(Some(probe.read().await?.since(before))),
            _ => Ok(None),
        }
    }

    /// How far the effect moved, once it has had the time to: it is waited for where `expected`, and then for one
    /// more that should not come.
    pub(crate) async fn step(&self, watch: Watch, expected: bool) -> Step<Option<Amount>> {
        let Facts { unit, lag, .. } = self.facts();
        if expected {
            // Where effects are known to come soon, one that does not come is not waited for as long as the first.
            let max =
                if unit.is_some() { (lag * 20).clamp(ARRIVAL_MAX / 4, ARRIVAL_MAX) } else { ARRIVAL_MAX };
            self.arrival_within(watch, max).await?;
        }
        let Some(mut last) = self.step_now(watch).await? else { return Ok(None) };
        let settle = self.options.settle.max(lag * 2);
        for _ in 0..5 {
            tokio::time::sleep(settle).await;
            let now = self.step_now(watch).await?.unwrap_or(last);
            if now == last {
                break;
            }
            last = now;
        }
        Ok(Some(last))
    }

    /// How many times it took effect, in steps of `unit`.
    pub(crate) async fn effects(&self, watch: Watch, unit: Option<Amount>, expected: bool) -> Step<Effects> {
        Ok(self.step(watch, expected).await?.map_or(Effects::Unseen, |step| Effects::of(step, unit)))
    }

    /// What one run of a body answers and moves the effect by; it runs once for all trials.
    pub(crate) async fn measure(&self, payload: Payload) -> Step<Measured> {
        self.measure_nth(payload, 0).await
    }

    /// The same of one more run.
    pub(crate) async fn measure_again(&self, payload: Payload) -> Step<Measured> {
        self.measure_nth(payload, 1).await
    }

    async fn measure_nth(&self, payload: Payload, nth: usize) -> Step<Measured> {
        let known = self
            .measured
            .lock()
            .iter()
            .filter(|(known, _)| *known == payload)
            .nth(nth)
            .map(|(_, m)| m.clone());
        if let Some(known) = known {
            return Ok(known);
        }
        let call = self.call(payload, &self.op())?;
        let watch = self.watch().await?;
        let answer = self.send(&call).await?;
        if !answer.is_accepted() {
            let said = story::answer(&answer);
            return Err(Stop::Unfit(format!("the body of {} was not accepted: {said}", payload.option())));
        }
        if let Some(lag) = self.arrival(watch).await? {
            self.learn(|facts| facts.lag = facts.lag.max(lag).min(LAG_MAX));
        }
        let unit = self.step(watch, false).await?.filter(|step| !step.is_zero());
        let measured = Measured { answer, unit };
        self.learn_measured(payload, measured.clone());
        Ok(measured)
    }

    pub(crate) fn learn_measured(&self, payload: Payload, measured: Measured) {
        self.measured.lock().push((payload, measured));
    }

    // ---- the story

    pub(crate) fn tell(&self, sent: String, got: String) {
        self.story.lock().add(sent, got);
    }

    pub(crate) fn tell_all(&self, story: &Story) {
        self.story.lock().append(story);
    }

    /// What was told since the last time.
    pub(crate) fn take_story(&self) -> Story {
        std::mem::take(&mut *self.story.lock())
    }
}

/// How long an effect is waited for that should come.
const ARRIVAL_MAX: Duration = Duration::from_secs(5);
/// Longer than this no effect is waited for that may come from an earlier trial.
const LAG_MAX: Duration = Duration::from_secs(3);
const UNIQUE: &str = "{{unique}}";

/// A random UUID, as the draft recommends for keys.
pub(crate) fn uuid() -> String {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random bytes");
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = |part: &[u8]| part.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    [&bytes[..4], &bytes[4..6], &bytes[6..8], &bytes[8..10], &bytes[10..]].map(hex).join("-")
}

/// One byte a character; a scenario with other characters is refused when it is read.
fn latin1(text: &str) -> Vec<u8> {
    text.chars().map(|c| u8::try_from(u32::from(c)).unwrap_or(b'?')).collect()
}

fn content_type(body: &[u8]) -> &'static str {
    if serde_json::from_slice::<serde_json::Value>(body).is_ok() {
        return "application/json";
    }
    match std::str::from_utf8(body) {
        Ok(text) if text.contains('=') && !text.contains(char::is_whitespace) => {
            "application/x-www-form-urlencoded"
        }
        Ok(_) => "text/plain; charset=utf-8",
        Err(_) => "application/octet-stream",
    }
}

/// Something that several scenarios look at, with its story.
pub(crate) type Shared<T> = tokio::sync::OnceCell<(Story, Step<Arc<T>>)>;

impl Lab<'_> {
    /// The result of an experiment that several scenarios share: made by the first, retold by the others.
    pub(crate) async fn shared<T>(
        &self,
        cell: &Shared<T>,
        make: impl Future<Output = Step<T>>,
    ) -> Step<Arc<T>> {
        let before = self.take_story();
        let made = Box::pin(async {
            let value = make.await.map(Arc::new);
            (self.take_story(), value)
        });
        let (story, value) = cell.get_or_init(|| made).await;
        self.tell_all(&before);
        self.tell_all(story);
        value.clone()
    }
}
