//! What happened, for Prometheus. No label holds a key, a scope, a path or anything else of a client.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use onlyonce_engine::Idempotency;
use onlyonce_http::{Code, IdempotencyLayer, Report, Verdict};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::health::Health;
use crate::counters::Counters;

/// In seconds: of a replay from memory to the longest a client waits.
pub(crate) const BUCKETS: [f64; 15] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

#[derive(Debug)]
pub(super) struct Metrics(Mutex<Registry>);

impl Metrics {
    pub(super) fn new(counters: &Counters) -> Self {
        let mut registry = Registry::with_prefix("onlyonce");
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        registry.register("build", "The release that runs", Info::new(version));
        registry.register_collector(Box::new(OfProxy(counters.clone())));
        Self(Mutex::new(registry))
    }

    pub(super) fn tell_of(
        &mut self,
        idem: &Idempotency,
        layer: &IdempotencyLayer,
        verdicts: &super::Verdicts,
        health: &Health,
    ) {
        let registry = self.0.get_mut();
        let verdicts = verdicts.0.clone();
        let seconds = [
            (
                "guarded_seconds",
                "Seconds from the head of a guarded request to the head of its answer",
                &verdicts.total,
            ),
            (
                "store_seconds",
                "Seconds that a guarded request waited for the store, or for another copy of itself",
                &verdicts.store,
            ),
        ];
        for (name, help, histogram) in seconds {
            registry.register(name, help, histogram.clone());
        }
        registry.register_collector(Box::new(verdicts));
        let (idem, layer, health) = (idem.clone(), layer.clone(), health.clone());
        registry.register_collector(Box::new(OfEngine { idem, layer, health }));
    }

    /// The text form.
    pub(super) fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.0.lock())?;
        Ok(text)
    }
}

/// Verdicts on guarded routes, and how long they took.
#[derive(Debug)]
pub(super) struct Verdicts {
    plain: [AtomicU64; PLAIN.len()],
    refused: [AtomicU64; Code::ALL.len()],
    store: Histogram,
    total: Histogram,
}

const PLAIN: [Verdict; 7] = [
    Verdict::Ran,
    Verdict::Replayed,
    Verdict::Released,
    Verdict::Unknown,
    Verdict::NotRecorded,
    Verdict::Degraded,
    Verdict::Ignored,
];

impl Default for Verdicts {
    fn default() -> Self {
        Self {
            plain: std::array::from_fn(|_| AtomicU64::new(0)),
            refused: std::array::from_fn(|_| AtomicU64::new(0)),
            store: Histogram::new(BUCKETS),
            total: Histogram::new(BUCKETS),
        }
    }
}

impl Verdicts {
    pub(super) fn count(&self, report: &Report) {
        let count = match report.verdict {
            Verdict::Refused(code) => {
                Code::ALL.iter().position(|one| *one == code).and_then(|at| self.refused.get(at))
            }
            verdict => PLAIN.iter().position(|one| *one == verdict).and_then(|at| self.plain.get(at)),
        };
        if let Some(count) = count {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.store.observe(report.store.as_secs_f64());
        self.total.observe(report.total.as_secs_f64());
    }
}

impl Collector for Verdicts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Requests on guarded routes by what became of them; refusals by their code";
        let plain = PLAIN.iter().map(ToString::to_string).zip(&self.plain);
        let refused = Code::ALL.iter().map(ToString::to_string).zip(&self.refused);
        let all: Vec<_> =
            plain.chain(refused).map(|(name, count)| (name, count.load(Ordering::Relaxed))).collect();
        by_label(&mut encoder, "guarded_requests", help, "verdict", all)
    }
}

#[derive(Debug)]
struct OfProxy(Counters);

impl Collector for OfProxy {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.0;
        gauge(&mut encoder, "connections", "Client connections, tunnels among them", counters.connections())?;
        gauge(
            &mut encoder,
            "requests_in_progress",
            "Requests of all kinds that are served now",
            counters.requests(),
        )?;
        counter(&mut encoder, "requests", "Requests read, guarded or not", counters.requests_total())?;
        let help = "Answers of the listener and the proxy themselves: malformed, past a bound, no upstream";
        let problems = counters.problems().map(|(code, count)| (code.to_string(), count));
        by_label(&mut encoder, "problems", help, "code", problems)?;
        let help = "Seconds from sending a request to the upstream until its response head";
        let mut family = encoder.encode_descriptor("upstream_seconds", help, None, MetricType::Histogram)?;
        let kinds = [("true", counters.upstream_guarded()), ("false", counters.upstream_passed())];
        kinds
            .into_iter()
            .try_for_each(|(guarded, seconds)| seconds.encode(family.encode_family(&[("guarded", guarded)])?))
    }
}

#[derive(Debug)]
struct OfEngine {
    idem: Idempotency,
    layer: IdempotencyLayer,
    health: Health,
}

impl Collector for OfEngine {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let idem = &self.idem;
        for (name, help, count) in idem.counts().iter() {
            counter(encoder, &format!("engine_{name}"), help.trim().trim_end_matches('.'), count)?;
        }
        let (entries, bytes) = idem.cached();
        gauge(encoder, "in_flight", "Guarded operations that are claimed or run", idem.in_flight())?;
        gauge(encoder, "waiting", "Duplicates that wait for a result", idem.waiting())?;
        gauge(encoder, "cache_replies", "Replies in memory for replays", entries)?;
        gauge(encoder, "cache_bytes", "Bytes of replies in memory for replays", bytes)?;
        let help = "Bytes of requests and replies in memory, out of the buffer budget";
        gauge(encoder, "buffered_bytes", help, self.layer.buffered_bytes())?;
        let help = "Seconds since the purge of expired records left nothing behind";
        gauge(encoder, "purge_lag_seconds", help, idem.purge_lag().as_secs())?;
        let help = "Outcomes that nobody knows, under retry those too that a retry may run again; more than 1000 are not counted";
        gauge(encoder, "unknown_records", help, self.health.unknown())?;
        gauge(
            encoder,
            "store_up",
            "Whether the store took a write when it was last asked, by a look at these metrics or at /readyz",
            usize::from(self.health.is_up()),
        )
    }
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: impl TryInto<i64>,
) -> fmt::Result {
    let value = ConstGauge::new(value.try_into().unwrap_or(i64::MAX));
    value.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

fn counter(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let value = ConstCounter::new(value);
    value.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)
}

/// One counter for each value of a label.
fn by_label(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    counts: impl IntoIterator<Item = (String, u64)>,
) -> fmt::Result {
    let mut family: MetricEncoder<'_> = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (value, count) in counts {
        let labels = [(label, value)];
        ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
