//! What a process holds, looked at from outside, and whether that stays.

use std::fs;
use std::io;
use std::time::Duration;

use serde::Serialize;

/// Below this a run is too short to tell what grows from what fills.
pub const TELLS_AFTER: Duration = Duration::from_secs(10 * 60);
/// Memory may end so much above where it was: an allocator is not a scale.
const MEMORY_SHARE: f64 = 0.05;
const MEMORY_MIB: f64 = 2.0;
/// Descriptors come and go with the connections of the moment.
const DESCRIPTORS: f64 = 16.0;

/// What a process holds at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Held {
    /// Resident memory.
    pub memory_mib: f64,
    /// Open descriptors.
    pub descriptors: u64,
}

/// Looks at a process.
///
/// # Errors
/// When it has ended, or may not be looked at.
pub fn held(pid: u32) -> io::Result<Held> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let memory_kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim_end_matches("kB").trim().parse::<f64>().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "it has ended"))?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
    Ok(Held { memory_mib: memory_kib / 1024.0, descriptors })
}

/// Two parts of a run against each other, and whether the later one is no worse than it may be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Trend {
    /// In the second fifth of the run.
    pub early: f64,
    /// In the last fifth.
    pub late: f64,
    /// Whether the late one is within what the early one allows.
    pub flat: bool,
}

impl Trend {
    /// Of memory, in MiB.
    pub fn of_memory(early: f64, late: f64) -> Self {
        Self { early, late, flat: late <= early * (1.0 + MEMORY_SHARE) + MEMORY_MIB }
    }

    /// Of open descriptors.
    pub fn of_descriptors(early: f64, late: f64) -> Self {
        Self { early, late, flat: late <= early + DESCRIPTORS }
    }

    /// Of a time: the machine has a say in it.
    pub fn of_time(early: f64, late: f64) -> Self {
        Self { early, late, flat: late <= early * 2.0 }
    }
}

/// The time that this share of all is not above, in milliseconds. Sorts them.
pub fn share_ms(times: &mut [Duration], share: f64) -> Option<f64> {
    times.sort_unstable();
    let at = (times.len().checked_sub(1)? as f64 * share) as usize;
    Some(times[at].as_secs_f64() * 1e3)
}

/// The one in the middle.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_looked_at_from_outside_and_one_that_ended_is_not() {
        let before = held(std::process::id()).expect("this process runs");
        let files: Vec<_> =
            (0..40).map(|_| fs::File::open("/proc/self/status").expect("it is there")).collect();
        let with_files = held(std::process::id()).expect("this process runs");
        assert!(before.memory_mib > 0.5 && with_files.descriptors >= before.descriptors.max(40));
        drop(files);
        let mut child = std::process::Command::new("true").spawn().expect("there is a true");
        let pid = child.id();
        child.wait().expect("it ends");
        assert!(held(pid).is_err());
    }

    #[test]
    fn shares_and_medians_are_of_what_is_there() {
        let mut times: Vec<_> = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!((share_ms(&mut times, 0.5), share_ms(&mut times, 0.99)), (Some(50.0), Some(99.0)));
        assert_eq!((share_ms(&mut [], 0.5), median([])), (None, None));
        assert_eq!(median([3.0, f64::NAN, 1.0, 2.0]), Some(2.0));
    }

    #[test]
    fn what_stays_is_flat_and_what_grows_is_not() {
        assert!(Trend::of_memory(30.0, 33.0).flat && !Trend::of_memory(30.0, 34.0).flat);
        assert!(Trend::of_descriptors(30.0, 46.0).flat && !Trend::of_descriptors(30.0, 47.0).flat);
        assert!(Trend::of_time(3.0, 6.0).flat && !Trend::of_time(3.0, 6.5).flat);
    }
}
