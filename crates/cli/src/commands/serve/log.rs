//! The log: one line for each guarded request, written by a thread of its own, so that a slow reader of standard error
//! never holds up a payment. What does not fit into its queue is dropped and counted.

use std::io::BufWriter;

use onlyonce_http::{Report, RequestOrigin, TraceContext, Verdict};
use tracing::{Level, Metadata};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Lines that may wait to be written.
const QUEUE_LINES_MAX: usize = 16_384;

/// The form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
    /// Warnings and errors only, as text
    Quiet,
}

/// Starts the log. `RUST_LOG` refines what is written.
pub(super) fn start(format: LogFormat) -> WorkerGuard {
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(QUEUE_LINES_MAX)
        .lossy(true)
        .thread_name("log")
        // Written out whenever the queue is empty.
        .finish(BufWriter::with_capacity(64 << 10, std::io::stderr()));
    let level = if format == LogFormat::Quiet { "warn" } else { "info" };
    // The spans say what the line of each request says too: they are for collectors, and for who asks for them.
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(format!("{level},onlyonce::trace=off")));
    let lines = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false);
    let registry = tracing_subscriber::registry().with(filter).with(filter_fn(|of| !tells_parameters(of)));
    // A second start in one process keeps the first log.
    let _ = match format {
        LogFormat::Json => {
            registry.with(lines.json().flatten_event(true).with_current_span(false)).try_init()
        }
        LogFormat::Text | LogFormat::Quiet => registry.with(lines.compact()).try_init(),
    };
    guard
}

/// Whether what is said may hold keys and replies: a driver that tells the parameters of each statement, whatever
/// `RUST_LOG` asks for.
fn tells_parameters(of: &Metadata<'_>) -> bool {
    of.target().starts_with("tokio_postgres") && *of.level() > Level::INFO
}

/// Writes the line of one request: no key, no scope, no credential.
pub(super) fn request(report: &Report) {
    let original = report.original.as_ref();
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(
                target: "onlyonce::request",
                verdict = %report.verdict,
                status = report.status,
                key_hash = report.key_hash.map(tracing::field::display),
                attempt = report.attempt,
                upstream_ms = ms(report.work),
                store_ms = ms(report.store),
                total_ms = ms(report.total),
                request_id = report.origin.request_id(),
                trace_id = report.origin.trace().map(TraceContext::trace_id),
                span_id = report.origin.span().map(tracing::field::display),
                original_request_id = original.and_then(RequestOrigin::request_id),
                original_trace_id = original.and_then(RequestOrigin::trace).map(TraceContext::trace_id),
            )
        };
    }
    match report.verdict {
        Verdict::NotRecorded => line!(error),
        Verdict::Unknown | Verdict::Degraded => line!(warn),
        _ => line!(info),
    }
}

fn ms(time: std::time::Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
