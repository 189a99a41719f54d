//! What was held and how long answers took, over the time of a run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::gauge::{Held, TELLS_AFTER, Trend, median, share_ms};

/// Rows of the printed table.
const ROWS: usize = 12;

/// Where one class of age ends and the next begins, in seconds: a young process is not held against an old one.
const AGES: [f64; 5] = [3.0, 10.0, 30.0, 100.0, 300.0];
/// Fewer looks than this at processes of one age say nothing.
const LOOKS_MIN: usize = 3;

/// Everything that was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Series {
    /// How long the run was to be.
    pub planned_seconds: f64,
    /// Answers while things were being broken; those that came while all was healed are left out.
    pub windows: Vec<Window>,
    /// Every process that was looked at, each life of a gateway by itself, in the order of their begin.
    pub lives: Vec<Life>,
    /// The second fifth against the last, where the run was long enough.
    pub trends: Vec<Compared>,
}

/// The answers between one look and the next.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Window {
    /// When it ended.
    pub seconds: f64,
    /// Operations that were begun in it.
    pub operations: usize,
    /// Answers that came in it.
    pub answers: usize,
    /// Half of them came within this time.
    pub p50_ms: Option<f64>,
    /// All but one in a hundred came within this time.
    pub p99_ms: Option<f64>,
}

/// One process, from its begin to its end.
#[derive(Clone, Debug, Serialize)]
pub struct Life {
    /// Whose, such as `gateway 0`; one that was killed and started again has several lives.
    pub name: String,
    /// When it was started.
    pub began_seconds: f64,
    /// What it held.
    pub looks: Vec<Look>,
}

/// One look at a process.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Look {
    /// When.
    pub seconds: f64,
    /// What it held.
    #[serde(flatten)]
    pub held: Held,
}

/// Something in the second fifth of the run and in the last.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// What, and of whom.
    pub what: String,
    /// Whether the processes that were compared were started in between; then they are compared by their age, and
    /// `flat` is a hint, not a finding.
    pub restarted: bool,
    /// The two.
    #[serde(flatten)]
    pub trend: Trend,
}

impl Series {
    /// Of a run that is to be so long.
    pub(crate) fn new(planned: Duration) -> Self {
        Self { planned_seconds: planned.as_secs_f64(), ..Self::default() }
    }

    pub(crate) fn answered(&mut self, at: Duration, operations: usize, mut times: Vec<Duration>) {
        self.windows.push(Window {
            seconds: at.as_secs_f64(),
            operations,
            answers: times.len(),
            p50_ms: share_ms(&mut times, 0.5),
            p99_ms: share_ms(&mut times, 0.99),
        });
    }

    pub(crate) fn looked(&mut self, name: &str, began: Duration, at: Duration, held: Held) {
        let (began_seconds, look) = (began.as_secs_f64(), Look { seconds: at.as_secs_f64(), held });
        let known = self.lives.iter_mut().rev().find(|life| life.name == name);
        match known.filter(|life| life.began_seconds == began_seconds) {
            Some(life) => life.looks.push(look),
            None => self.lives.push(Life { name: name.to_owned(), began_seconds, looks: vec![look] }),
        }
    }

    /// Compares what can be compared.
    pub(crate) fn finish(&mut self) {
        let end = self.end();
        if end < TELLS_AFTER.as_secs_f64() {
            return;
        }
        self.compare_held(end, "memory MiB", |held| held.memory_mib, Trend::of_memory);
        self.compare_held(end, "descriptors", |held| held.descriptors as f64, Trend::of_descriptors);
        self.compare_times(end, "p50 ms", |window| window.p50_ms);
        self.compare_times(end, "p99 ms", |window| window.p99_ms);
    }

    fn compare_held(&mut self, end: f64, kind: &str, of: fn(Held) -> f64, trend: fn(f64, f64) -> Trend) {
        let mut found = Vec::new();
        for name in self.names() {
            if let Some((early, late)) = self.of_one_life(name, end, of) {
                let what = format!("{kind} of {name}");
                found.push(Compared { what, restarted: false, trend: trend(early, late) });
            }
        }
        if let Some((early, late)) = self.of_like_age(end, of) {
            let what = format!("{kind} of restarted processes of like age");
            found.push(Compared { what, restarted: true, trend: trend(early, late) });
        }
        self.trends.extend(found);
    }

    fn compare_times(&mut self, end: f64, what: &str, of: fn(&Window) -> Option<f64>) {
        let fifth = |n| {
            let within = self.windows.iter().filter(|window| in_fifth(window.seconds, n, end));
            median(within.filter_map(of))
        };
        if let (Some(early), Some(late)) = (fifth(1), fifth(4)) {
            let trend = Trend::of_time(early, late);
            self.trends.push(Compared { what: what.to_owned(), restarted: false, trend });
        }
    }

    /// When the last look was.
    pub(crate) fn end(&self) -> f64 {
        self.windows.last().map_or(0.0, |window| window.seconds)
    }

    /// Whom there are lives of, each once.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let first =
            |(at, life): &(usize, &Life)| !self.lives[..*at].iter().any(|before| before.name == life.name);
        self.lives.iter().enumerate().filter(first).map(|(_, life)| &*life.name)
    }

    /// One process that was there in both fifths: against itself.
    fn of_one_life(&self, name: &str, end: f64, of: fn(Held) -> f64) -> Option<(f64, f64)> {
        self.lives.iter().filter(|life| life.name == name).find_map(|life| {
            let fifth = |n| {
                let within = life.looks.iter().filter(|look| in_fifth(look.seconds, n, end));
                median(within.map(|look| of(look.held)))
            };
            fifth(1).zip(fifth(4))
        })
    }

    /// Processes that were started again and again: those of the second fifth against those of the last, age by age.
    fn of_like_age(&self, end: f64, of: fn(Held) -> f64) -> Option<(f64, f64)> {
        let mut ages: BTreeMap<usize, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
        let lasted = |life: &Life| self.of_one_life(&life.name, end, of).is_some();
        for life in self.lives.iter().filter(|life| !lasted(life)) {
            for look in &life.looks {
                let age = look.seconds - life.began_seconds;
                let class = ages.entry(AGES.partition_point(|limit| *limit < age)).or_default();
                match look.seconds {
                    at if in_fifth(at, 1, end) => class.0.push(of(look.held)),
                    at if in_fifth(at, 4, end) => class.1.push(of(look.held)),
                    _ => {}
                }
            }
        }
        let of_both = ages.into_values().filter(|(early, late)| early.len().min(late.len()) >= LOOKS_MIN);
        let medians: Vec<_> = of_both.filter_map(|(early, late)| median(early).zip(median(late))).collect();
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        let (early, late): (Vec<_>, Vec<_>) = medians.into_iter().unzip();
        (!early.is_empty()).then(|| (mean(early), mean(late)))
    }

    /// For people: a table of some lines, and what became of it.
    pub(crate) fn text(&self) -> String {
        let mut text = format!(
            "{:>9} {:>14} {:>12} {:>11} {:>11} {:>9} {:>9}\n",
            "minutes", "process MiB", "descriptors", "prover MiB", "operations", "p50 ms", "p99 ms"
        );
        let step = self.windows.len().div_ceil(ROWS).max(1);
        let mut from = 0.0;
        for rows in self.windows.chunks(step) {
            let to = rows[rows.len() - 1].seconds;
            let most = |gateways: bool, of: fn(Held) -> f64| {
                let of_whom = self.lives.iter().filter(|life| (life.name != PROVER) == gateways);
                let looks = of_whom.flat_map(|life| &life.looks);
                let within = looks.filter(|look| look.seconds > from && look.seconds <= to);
                within.map(|look| of(look.held)).reduce(f64::max)
            };
            let operations: usize = rows.iter().map(|row| row.operations).sum();
            let number = |value: Option<f64>, digits: usize| match value {
                Some(value) => format!("{value:.digits$}"),
                None => "-".into(),
            };
            let _ = writeln!(
                text,
                "{:>9.1} {:>14} {:>12} {:>11} {:>11} {:>9} {:>9}",
                to / 60.0,
                number(most(true, |held| held.memory_mib), 1),
                number(most(true, |held| held.descriptors as f64), 0),
                number(most(false, |held| held.memory_mib), 1),
                operations,
                number(median(rows.iter().filter_map(|row| row.p50_ms)), 1),
                number(median(rows.iter().filter_map(|row| row.p99_ms)), 1),
            );
            from = to;
        }
        text.push_str("memory and descriptors: the most of any; times: the median of the windows\n");
        for Compared { what, restarted, trend: Trend { early, late, flat } } in &self.trends {
            let verdict = match (restarted, flat) {
                (false, true) => ": flat",
                (false, false) => ": NOT FLAT",
                (true, _) => "",
            };
            let _ = writeln!(text, "{what}: {early:.1} in the second fifth, {late:.1} in the last{verdict}");
        }
        if self.trends.is_empty() {
            text.push_str("whether that is flat: too short to say\n");
        }
        text
    }
}

/// The process that breaks and judges.
pub(crate) const PROVER: &str = "prover";

fn in_fifth(seconds: f64, number: usize, end: f64) -> bool {
    let fifth = end / 5.0;
    seconds > fifth * number as f64 && seconds <= fifth * (number + 1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An hour, looked at every 18 seconds: one gateway that lives through it, and one that lives for five minutes each time.
    fn hour(memory: impl Fn(f64, f64) -> f64) -> Series {
        let mut series = Series::new(Duration::from_secs(3600));
        for at in (1..=200).map(|n| Duration::from_secs(n * 18)) {
            let now = at.as_secs();
            let looked =
                |age: u64| Held { memory_mib: memory(at.as_secs_f64(), age as f64), descriptors: 20 };
            series.looked("gateway 0", Duration::ZERO, at, looked(now));
            series.looked("gateway 1", Duration::from_secs(now / 300 * 300), at, looked(now % 300));
            series.answered(at, 10, vec![Duration::from_millis(2); 5]);
        }
        series.finish();
        series
    }

    fn flat(series: &Series, what: &str) -> bool {
        series.trends.iter().find(|found| found.what == what).expect(what).trend.flat
    }

    #[test]
    fn what_grows_with_age_is_found_in_the_one_that_lives_and_not_in_the_restarted() {
        let (one, like) = ("memory MiB of gateway 0", "memory MiB of restarted processes of like age");
        let grows = hour(|_, age| 20.0 + age / 60.0);
        assert!(!flat(&grows, one) && flat(&grows, like), "{:?}", grows.trends);
        assert!(grows.text().contains("NOT FLAT") && flat(&grows, "p99 ms"));
        // Each new process larger than the last of its age: something outside of them grows.
        let fed = hour(|at, _| 20.0 + at / 60.0);
        assert!(!flat(&fed, like), "{:?}", fed.trends);
        let steady = hour(|_, age| 30.0 - 10.0 / (1.0 + age));
        assert!(steady.trends.iter().all(|found| found.trend.flat), "{:?}", steady.trends);
        assert!(!steady.trends.iter().any(|found| found.what == "memory MiB of gateway 1"));
        assert_eq!(steady.names().collect::<Vec<_>>(), ["gateway 0", "gateway 1"]);
        assert_eq!(steady.lives.len(), 1 + 13);
    }

    #[test]
    fn a_short_run_says_that_it_is_too_short() {
        let mut series = Series::new(Duration::from_secs(8));
        series.answered(Duration::from_secs(1), 0, Vec::new());
        series.finish();
        assert!(series.text().contains("too short to say") && series.trends.is_empty());
    }
}
