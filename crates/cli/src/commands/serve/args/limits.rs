//! Everything is bounded: times, numbers, bytes. Past each bound there is an answer.

use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use onlyonce_engine::Limits;
use onlyonce_gateway::GatewayOptions;
use onlyonce_gateway::options::{HEADER_BYTES_MAX, HEADER_BYTES_MIN, HEADERS_MAX};
use onlyonce_http::IdempotencyLayer;

use crate::commands::units::{bytes, duration, timeout};
use crate::failure::Failure;

/// What a request counts for in the budget besides its body.
const HEAD_BYTES: usize = 1 << 10;

/// More of anything at once is a slip of the pen.
const COUNT_MAX: usize = 10_000_000;

#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// How long a connection may be silent before a request, or over HTTP/2 be without one; then it is closed
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = timeout)]
    client_idle_timeout: Duration,
    /// How long a request head may take over HTTP/1.1, from its first byte; past it 408
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = timeout)]
    header_timeout: Duration,
    /// How long the body of a guarded request may take, and that of any other may pause; past it 408
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = timeout)]
    body_timeout: Duration,
    /// How long a connection to the upstream may take; past it 502
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = timeout)]
    connect_timeout: Duration,
    /// How long the upstream may take to answer; past it 504
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = timeout)]
    upstream_timeout: Duration,
    /// How long a connection to the upstream is kept for the next request; under the upstream's own idle time, or a request
    /// may meet the end of its connection. A guarded request uses one idle for under 500ms only
    #[arg(long, value_name = "TIME", default_value = "800ms", value_parser = duration)]
    upstream_idle_timeout: Duration,
    /// How long running requests get to finish after SIGTERM
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    shutdown_timeout: Duration,
    /// Connections at once; past it 503, and then more wait in the listen queue
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = at_least_one())]
    max_connections: usize,
    /// Requests of all kinds at once; past it 503
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = at_least_one())]
    max_requests: usize,
    /// Guarded operations at once; past it 503
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = at_least_one())]
    max_in_flight: usize,
    /// Duplicates that wait for a result at once; past it 409 without a wait
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = at_least_one())]
    max_waiters: usize,
    /// Requests at once on one HTTP/2 connection
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    max_streams: u32,
    /// Threads that serve HTTP/1.1 connections, each its own; unless given, one for each core. 0: all threads share all connections,
    /// as they always do those of HTTP/2
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(0..=WORKERS_MAX))]
    workers: Option<usize>,
    /// Idle connections to the upstream that are kept
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_idle_upstream: usize,
    /// Lines of a request head, past it 431; and of the upstream's answer, past it 502
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = up_to(HEADERS_MAX))]
    max_headers: usize,
    /// The longest request head, past it 431; and the longest head of the upstream's answer, past it 502
    #[arg(long, value_name = "BYTES", default_value = "64KiB", value_parser = header_bytes)]
    max_header_bytes: usize,
    /// The longest body of a guarded request; past it 413
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = bytes)]
    max_request_body: usize,
    /// The longest reply body that is stored; a longer one streams through, and its replays have no body. So does one that finds no
    /// room in --buffer-budget for 5 s
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = bytes)]
    max_stored_body: usize,
    /// All bodies of guarded requests and replies in memory at once, a quarter of it for replies alone; past it a request gets
    /// 503, and a reply waits 5 s for room to be stored with its body
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = bytes)]
    buffer_budget: usize,
    /// Replies kept in memory for replays; 0: none
    #[arg(long, value_name = "BYTES", default_value = "8MiB", value_parser = bytes64)]
    cache_bytes: u64,
    /// How long a reply is replayed from memory before the store is asked again, at most 60s: so long may pass until a
    /// `keys forget` reaches this gateway
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = cache_time)]
    cache_time: Duration,
}

/// The most threads that may be asked for.
const WORKERS_MAX: u64 = 1024;

/// What `keys forget` says: no gateway replays longer from its memory.
const CACHE_TIME_MAX: Duration = Duration::from_secs(60);

impl LimitArgs {
    pub(crate) fn of_gateway(&self, options: GatewayOptions) -> GatewayOptions {
        GatewayOptions {
            client_idle_timeout: self.client_idle_timeout,
            header_timeout: self.header_timeout,
            body_timeout: self.body_timeout,
            connect_timeout: self.connect_timeout,
            upstream_timeout: self.upstream_timeout,
            pool_idle: self.upstream_idle_timeout,
            pool_idle_guarded: options.pool_idle_guarded.min(self.upstream_idle_timeout),
            pool_idle_max: self.max_idle_upstream,
            shutdown_timeout: self.shutdown_timeout,
            max_connections: self.max_connections,
            max_requests: self.max_requests,
            max_streams: self.max_streams,
            workers: self.workers.unwrap_or(options.workers),
            max_headers: self.max_headers,
            max_header_bytes: self.max_header_bytes,
            ..options
        }
    }

    /// A body that is allowed and never finds room would be refused for ever, and told to come again.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let for_requests = self.buffer_budget - self.buffer_budget / 4;
        if for_requests < self.max_request_body.saturating_add(HEAD_BYTES) {
            return Err(Failure::Usage(format!(
                "--buffer-budget {}: a body of --max-request-body ({} bytes) would never find room; a quarter is for replies alone",
                self.buffer_budget, self.max_request_body
            )));
        }
        // It would wait for room, and be stored without its body.
        if self.buffer_budget < self.max_stored_body {
            return Err(Failure::Usage(format!(
                "--buffer-budget {}: a reply of --max-stored-body ({} bytes) would never find room",
                self.buffer_budget, self.max_stored_body
            )));
        }
        Ok(())
    }

    pub(crate) fn of_engine(&self) -> Limits {
        Limits {
            max_in_flight: self.max_in_flight,
            max_waiters: self.max_waiters,
            cache_bytes: self.cache_bytes,
            cache_ttl: self.cache_time,
            ..Limits::default()
        }
    }

    pub(crate) fn apply(&self, layer: IdempotencyLayer) -> IdempotencyLayer {
        layer
            .max_request_body(self.max_request_body)
            .body_timeout(self.body_timeout)
            .max_stored_body(self.max_stored_body)
            .max_buffered(self.buffer_budget)
    }
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    up_to(COUNT_MAX)
}

fn up_to(max: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=max as u64)
}

fn cache_time(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        time if time <= CACHE_TIME_MAX => Ok(time),
        _ => Err("the limit is 60s: so long after a `keys forget` no gateway may replay".into()),
    }
}

fn header_bytes(text: &str) -> Result<usize, String> {
    match bytes(text)? {
        few if few < HEADER_BYTES_MIN => Err("a head is given at least 8KiB".into()),
        many if many > HEADER_BYTES_MAX => Err("a head is given at most 16MiB".into()),
        bytes => Ok(bytes),
    }
}

fn bytes64(text: &str) -> Result<u64, String> {
    bytes(text).map(|bytes| bytes as u64)
}
