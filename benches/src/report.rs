//! What came out: tables in Markdown, or JSON.

use anyhow::Result;
use serde::Serialize;

use crate::measure::{Comparison, Sample, Target};

/// All series of one run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    rates: Vec<Rates>,
    ratios: Vec<Ratio>,
}

/// What one subject did, round by round.
#[derive(Debug, Serialize)]
struct Rates {
    series: String,
    subject: String,
    samples: Vec<Sample>,
}

/// One subject against another, over the rounds.
#[derive(Debug, Serialize)]
struct Ratio {
    subject: String,
    against: String,
    target: Target,
    median: f64,
    min: f64,
    max: f64,
    reached: Reached,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Reached {
    Aim,
    AtLeast,
    Missed,
    NoTarget,
}

impl Report {
    pub(crate) fn add(
        &mut self,
        series: &str,
        subjects: Vec<(String, Vec<Sample>)>,
        comparisons: &[Comparison],
    ) {
        let samples_of = |name: &str| subjects.iter().find(|(n, _)| n == name).map(|(_, samples)| samples);
        for comparison in comparisons {
            // Left out by `--only`.
            let (Some(a), Some(b)) = (samples_of(&comparison.subject), samples_of(&comparison.against))
            else {
                continue;
            };
            self.ratios.push(Ratio::new(comparison, a, b));
        }
        self.rates.extend(subjects.into_iter().map(|(subject, samples)| Rates {
            series: series.into(),
            subject,
            samples,
        }));
    }

    pub(crate) fn print_json(&self) -> Result<()> {
        println!("{}", serde_json::to_string_pretty(self)?);
        Ok(())
    }

    pub(crate) fn print_tables(&self) -> Result<()> {
        let ratios = self.ratios.iter().map(Ratio::cells);
        print_table(
            &["subject", "against", "ratio (min–max)", "target; aim", "reached"],
            &ratios.collect::<Vec<_>>(),
        );
        println!();
        let rates = self.rates.iter().map(Rates::cells);
        print_table(
            &["series", "subject", "a second (min–max)", "p50 µs", "p99 µs", "CPU µs"],
            &rates.collect::<Vec<_>>(),
        );
        Ok(())
    }
}

impl Ratio {
    fn new(comparison: &Comparison, subject: &[Sample], against: &[Sample]) -> Self {
        let of = |sample: &Sample| match comparison.target {
            Target::Rate(..) | Target::None => sample.rate,
            Target::Time(..) => sample.p50_us,
            Target::Tail(..) => sample.p99_us,
        };
        let Spread { median, min, max } = spread(subject.iter().zip(against).map(|(a, b)| of(a) / of(b)));
        let reached = match comparison.target {
            Target::Rate(_, aim) if median >= aim => Reached::Aim,
            Target::Rate(least, _) if median >= least => Reached::AtLeast,
            Target::Time(_, aim) | Target::Tail(_, aim) if median <= aim => Reached::Aim,
            Target::Time(most, _) | Target::Tail(most, _) if median <= most => Reached::AtLeast,
            Target::None => Reached::NoTarget,
            _ => Reached::Missed,
        };
        Self {
            subject: comparison.subject.clone(),
            against: comparison.against.clone(),
            target: comparison.target,
            median,
            min,
            max,
            reached,
        }
    }

    fn cells(&self) -> Vec<String> {
        let target = match self.target {
            Target::Rate(least, aim) => format!("≥ {least:.2}; {aim:.2}"),
            Target::Tail(most, aim) => format!("≤ {most:.2} × its p99; {aim:.2}"),
            Target::Time(most, aim) => format!("≤ {most:.2} × its p50; {aim:.2}"),
            Target::None => "none".into(),
        };
        let reached = match self.reached {
            Reached::Aim => "aim",
            Reached::AtLeast => "yes",
            Reached::Missed => "**no**",
            Reached::NoTarget => "",
        };
        let ratio = format!("{:.2} ({:.2}–{:.2})", self.median, self.min, self.max);
        vec![self.subject.clone(), self.against.clone(), ratio, target, reached.into()]
    }
}

impl Rates {
    fn cells(&self) -> Vec<String> {
        let of = |what: fn(&Sample) -> f64| spread(self.samples.iter().map(what));
        let rate = of(|sample| sample.rate);
        vec![
            self.series.clone(),
            self.subject.clone(),
            format!("{:.0} ({:.0}–{:.0})", rate.median, rate.min, rate.max),
            format!("{:.0}", of(|sample| sample.p50_us).median),
            format!("{:.0}", of(|sample| sample.p99_us).median),
            format!("{:.1}", of(|sample| sample.cpu_us).median),
        ]
    }
}

struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

fn spread(values: impl Iterator<Item = f64>) -> Spread {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    let median = match values.len() % 2 {
        1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    };
    Spread { median, min: values[0], max: values[values.len() - 1] }
}

fn print_table(head: &[&str], rows: &[Vec<String>]) {
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    let width = |column: usize| {
        rows.iter().chain([&head]).map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let print = |row: &[String]| {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("| {} |", cells.join(" | "));
    };
    print(&head);
    print(&widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>());
    rows.iter().for_each(|row| print(row));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(rates: &[f64]) -> Vec<Sample> {
        rates
            .iter()
            .map(|rate| Sample { rate: *rate, p50_us: 1e6 / rate, p99_us: 0.0, cpu_us: 0.0 })
            .collect()
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let mut report = Report::default();
        let subjects =
            vec![("b".into(), samples(&[100.0, 10.0, 1000.0])), ("a".into(), samples(&[50.0, 6.0, 400.0]))];
        let comparisons = [
            Comparison::new("a", "b", Target::Rate(0.5, 0.6)),
            Comparison::new("a", "b", Target::Time(1.9, 1.0)),
            Comparison::new("a", "left out", Target::Rate(1.0, 1.0)),
        ];
        report.add("s", subjects, &comparisons);
        let [rate, time] = &report.ratios[..] else { panic!("two ratios") };
        assert_eq!((rate.median, rate.min, rate.max), (0.5, 0.4, 0.6));
        assert!(matches!(rate.reached, Reached::AtLeast));
        assert!((time.median - 2.0).abs() < 1e-9 && matches!(time.reached, Reached::Missed));
    }

    #[test]
    fn an_even_number_of_rounds_has_a_median_too() {
        assert_eq!(spread([4.0, 1.0, 3.0, 2.0].into_iter()).median, 2.5);
    }
}
