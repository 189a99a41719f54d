//! How many files this process may have open: each connection is one, on either side.

use rustix::process::{Resource, getrlimit, setrlimit};

/// What is open besides connections: the store, the log, the listener, the runtime's own.
const OTHERS: u64 = 256;

/// Raises what is allowed to what may be allowed: many systems start at 1024, for the sake of programs that use `select`.
/// Returns how many may be open; `None` when there is no limit.
pub(super) fn raise_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
}

/// What to tell the operator when not all connections have a place.
pub(super) fn hazard(open_max: Option<u64>, connections_max: usize) -> Option<String> {
    let places = open_max?.saturating_sub(OTHERS);
    let wanted = u64::try_from(connections_max).unwrap_or(u64::MAX);
    (places < wanted).then(|| {
        format!(
            "only {places} connections have a place, of {wanted}: raise the limit of open files (ulimit -Hn, LimitNOFILE=), \
             or lower --max-connections"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_too_low_is_told() {
        assert_eq!(hazard(None, 10_000), None);
        assert_eq!(hazard(Some(20_000), 10_000), None);
        assert!(hazard(Some(4096), 10_000).unwrap().contains("only 3840 connections"));
    }
}
