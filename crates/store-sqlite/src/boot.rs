//! Time as the records keep it.
//!
//! Every time in a row is in milliseconds on the scale of the row's `clock`: an entry of `idempotency_clocks`, which
//! says in which boot it was written and what wall time minus boot time was then. Within one boot such times are boot
//! times in readable clothes, so a step of the wall clock cannot move a lease or a retention.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::clock::unix_ms;
use onlyonce_core::{Clock, StoreErrorKind};
use parking_lot::Mutex;
use rusqlite::{Connection, params};

use crate::error::Fault;

/// The clocks have parted when the wall clock is this far from where the boot clock says it should be.
const PARTED_MS: i64 = 60_000;
/// A parting that has stood for this long is a correction, not a mistake.
const ACCEPTED_AFTER_MS: i64 = 3_600_000;

/// The store's clock and the scales of its records.
#[derive(Debug)]
pub(crate) struct Timeline {
    clock: Arc<dyn Clock>,
    boot_id: String,
    // What a time namespace adds to the boot clock of this process: processes in different ones share a file.
    namespace_ms: i64,
    scales: Mutex<Arc<Scales>>,
    parted_since: Mutex<Option<i64>>,
}

/// Whether wall clock and boot clock agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    Together,
    /// The wall clock was stepped by over 60 s.
    Parted,
    /// That has stood for an hour: it is a correction, not a mistake.
    Stood,
}

/// One reading of the clock; all of a transaction is judged by it.
#[derive(Debug)]
pub(crate) struct Now<'t> {
    timeline: &'t Timeline,
    boot_ms: i64,
    // Rounded up: ends of leases are never early.
    boot_ms_up: i64,
    wall_ms: i64,
    scales: Arc<Scales>,
}

/// The entries of `idempotency_clocks`.
#[derive(Debug, Default)]
pub(crate) struct Scales {
    current: Scale,
    all: Vec<Scale>,
}

/// One entry: what the boot clock of today plus `shift_ms` shows is now on that scale.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scale {
    pub(crate) id: i64,
    /// Written in this boot: leases may still run.
    pub(crate) this_boot: bool,
    shift_ms: i64,
}

impl Timeline {
    /// Without scales: [`Timeline::join`] comes next.
    pub(crate) fn new(clock: Arc<dyn Clock>, boot_id: String, namespace_ms: i64) -> Self {
        let (scales, parted_since) = (Mutex::default(), Mutex::default());
        Self { clock, boot_id, namespace_ms, scales, parted_since }
    }

    /// Reads the scales; the first to open the file in this boot adds one. Inside a write transaction, whose failure
    /// is the end of this timeline.
    pub(crate) fn join(&self, conn: &Connection) -> Result<(), Fault> {
        if !self.refresh(conn)? {
            self.add_scale(conn)?;
            self.refresh(conn)?;
        }
        Ok(())
    }

    pub(crate) fn now(&self) -> Now<'_> {
        let boot = self.clock.boot();
        let boot_ms = ms(boot).saturating_sub(self.namespace_ms);
        let boot_ms_up = ms_up(boot).saturating_sub(self.namespace_ms);
        let scales = Arc::clone(&self.scales.lock());
        Now { timeline: self, boot_ms, boot_ms_up, wall_ms: unix_ms(self.clock.wall()), scales }
    }

    /// Whether the wall clock has left the boot clock.
    pub(crate) fn parting(&self) -> Parting {
        let now = self.now();
        let ahead_ms = now.wall_ms - now.ms();
        let mut since = self.parted_since.lock();
        if ahead_ms.unsigned_abs() <= PARTED_MS as u64 {
            *since = None;
            return Parting::Together;
        }
        let start = *since.get_or_insert_with(|| {
            tracing::warn!(ahead_s = ahead_ms / 1000, "the wall clock was stepped: purge pauses");
            now.boot_ms
        });
        if now.boot_ms - start >= ACCEPTED_AFTER_MS { Parting::Stood } else { Parting::Parted }
    }

    /// Adds a scale with the difference as it is now. Inside a write transaction; [`Timeline::refresh`] comes after
    /// its commit, so that no record is written on a scale that was rolled back.
    pub(crate) fn add_scale(&self, conn: &Connection) -> Result<(), Fault> {
        let now = self.now();
        conn.execute(
            "INSERT INTO main.idempotency_clocks (boot_id, wall_minus_boot_ms) VALUES (?1, ?2)",
            params![self.boot_id, now.wall_ms - now.boot_ms],
        )?;
        Ok(())
    }

    /// Reads the scales; where this boot has none yet, one is made up that is not in the file. For who cannot write.
    pub(crate) fn look(&self, conn: &Connection) -> Result<(), Fault> {
        let mut rows = scale_rows(conn)?;
        if !self.adopt(&rows) {
            let now = self.now();
            rows.push((NOT_IN_THE_FILE, self.boot_id.clone(), now.wall_ms - now.boot_ms));
            self.adopt(&rows);
        }
        Ok(())
    }

    /// Reads the scales, and answers whether this boot has one.
    pub(crate) fn refresh(&self, conn: &Connection) -> Result<bool, Fault> {
        Ok(self.adopt(&scale_rows(conn)?))
    }

    fn adopt(&self, rows: &[(i64, String, i64)]) -> bool {
        let last_of =
            |boot_id: &str| rows.iter().rev().find(|row| row.1 == boot_id).map(|row| (row.0, row.2));
        let Some((id, offset_ms)) = last_of(&self.boot_id) else { return false };
        let current = Scale { id, this_boot: true, shift_ms: offset_ms };
        let scale_of = |(id, boot_id, offset): &(i64, String, i64)| {
            let this_boot = *boot_id == self.boot_id;
            // The last difference of a boot is the truest: earlier ones are read with that correction.
            let last = last_of(boot_id).map_or(*offset, |(_, last)| last);
            let shift_ms = if this_boot { *offset } else { offset_ms + offset - last };
            Scale { id: *id, this_boot, shift_ms }
        };
        let all = rows.iter().map(scale_of).collect();
        *self.scales.lock() = Arc::new(Scales { current, all });
        true
    }
}

// Ids in the file begin with 1.
const NOT_IN_THE_FILE: i64 = 0;

fn scale_rows(conn: &Connection) -> Result<Vec<(i64, String, i64)>, Fault> {
    let mut query = conn
        .prepare_cached("SELECT id, boot_id, wall_minus_boot_ms FROM main.idempotency_clocks ORDER BY id")?;
    let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

impl Now<'_> {
    /// The scale on which new times are written.
    pub(crate) fn clock(&self) -> i64 {
        self.scales.current.id
    }

    /// Now, on the current scale.
    pub(crate) fn ms(&self) -> i64 {
        self.boot_ms.saturating_add(self.scales.current.shift_ms)
    }

    /// What the wall clock shows.
    pub(crate) fn wall_ms(&self) -> i64 {
        self.wall_ms
    }

    /// `after` from now on the current scale, never early.
    pub(crate) fn end(&self, after: Duration) -> i64 {
        self.boot_ms_up.saturating_add(self.scales.current.shift_ms).saturating_add(ms_up(after))
    }

    /// Now, on that scale.
    pub(crate) fn ms_on(&self, scale: &Scale) -> i64 {
        self.boot_ms.saturating_add(scale.shift_ms)
    }

    /// The scale of a row. One that another process added in the meantime is read from the file.
    pub(crate) fn scale(&self, conn: &Connection, id: i64) -> Result<Scale, Fault> {
        let find = |scales: &Scales| scales.all.iter().find(|scale| scale.id == id).copied();
        if let Some(scale) = find(&self.scales) {
            return Ok(scale);
        }
        self.timeline.refresh(conn)?;
        find(&self.timeline.scales.lock())
            .ok_or_else(|| Fault::unreadable(format!("a record of clock {id}, which is not in the file")))
    }

    /// Every scale that records may be on.
    pub(crate) fn scales(&self) -> &[Scale] {
        &self.scales.all
    }
}

/// The id of this boot of the machine.
///
/// A lease of another boot is over, so a guess will not do: where the system gives none, the store does not open.
pub(crate) fn system_boot_id() -> Result<String, Fault> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    match std::fs::read_to_string(path) {
        Ok(id) if !id.trim().is_empty() => Ok(id.trim().into()),
        other => Err(Fault::new(
            StoreErrorKind::Unfit,
            format!("leases need the id of this boot, and {} gives none ({other:?})", path.display()),
        )),
    }
}

/// What the time namespace of this process adds to the boot clock. Kernels without time namespaces add nothing.
pub(crate) fn system_namespace_ms() -> i64 {
    std::fs::read_to_string("/proc/self/timens_offsets").map_or(0, |text| boottime_offset_ms(&text))
}

// Lines such as `boottime  86400  500000000`; older kernels write the clock's number, 7.
fn boottime_offset_ms(offsets: &str) -> i64 {
    let line = offsets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    line.filter_map(|fields| match fields[..] {
        ["boottime" | "7", seconds, nanos] => {
            Some(seconds.parse::<i64>().ok()? * 1000 + nanos.parse::<i64>().ok()? / 1_000_000)
        }
        _ => None,
    })
    .next()
    .unwrap_or(0)
}

// A lease of three hundred thousand years is long enough, and leaves room for sums.
const MS_MAX: i64 = i64::MAX / 1024;

fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(MS_MAX).min(MS_MAX)
}

fn ms_up(duration: Duration) -> i64 {
    ms(duration).saturating_add(i64::from(!duration.subsec_nanos().is_multiple_of(1_000_000)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_a_time_namespace_is_read() {
        assert_eq!(
            boottime_offset_ms("monotonic           0         0\nboottime            0         0\n"),
            0
        );
        assert_eq!(boottime_offset_ms("monotonic 5 0\nboottime -86400 500000000\n"), -86_399_500);
        assert_eq!(boottime_offset_ms(""), 0);
    }

    #[test]
    fn ends_are_rounded_up() {
        assert_eq!(ms_up(Duration::from_micros(1)), 1);
        assert_eq!(ms_up(Duration::from_millis(7)), 7);
        assert_eq!(ms_up(Duration::MAX), MS_MAX + 1);
    }
}
