//! A run as a picture: memory, descriptors and latency over time, three panels under each other.

use std::fmt::Write as _;

use crate::gauge::Held;
use crate::series::{Life, PROVER, Series};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 130.0;
const PANEL: f64 = 170.0;
const BETWEEN: f64 = 52.0;
const TOP: f64 = 64.0;
const HEIGHT: f64 = TOP + 3.0 * PANEL + 2.0 * BETWEEN + 48.0;

/// Told apart by people who see colours otherwise, too (Okabe and Ito); the last is the prover's.
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const PROVERS: &str = "#888888";

/// A file of SVG, whole.
pub(crate) fn svg(series: &Series, title: &str, subtitle: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"16\" font-weight=\"bold\">{}</text>\n\
         <text x=\"{LEFT}\" y=\"42\">{}</text>\n",
        escaped(title),
        escaped(subtitle)
    );
    let end = series.end().max(1.0);
    let memory = of_lives(series, |held| held.memory_mib);
    panel(&mut svg, 0, "resident memory, MiB", &Scale::linear(&memory, end), &memory);
    let descriptors = of_lives(series, |held| held.descriptors as f64);
    panel(&mut svg, 1, "open descriptors", &Scale::linear(&descriptors, end), &descriptors);
    let latency = of_windows(series);
    panel(&mut svg, 2, "latency of answers, ms", &Scale::logarithmic(&latency, end), &latency);
    svg.push_str("</svg>\n");
    svg
}

/// One line of a panel: in pieces, where a process ended and another took its place.
struct Line {
    name: String,
    colour: &'static str,
    pieces: Vec<Vec<(f64, f64)>>,
}

fn of_lives(series: &Series, of: fn(Held) -> f64) -> Vec<Line> {
    let colour = |at: usize, name: &str| if name == PROVER { PROVERS } else { COLOURS[at % COLOURS.len()] };
    let piece = |life: &Life| life.looks.iter().map(|look| (look.seconds, of(look.held))).collect();
    let mut names: Vec<_> = series.names().collect();
    names.sort_unstable();
    let line = |(at, name): (usize, &str)| Line {
        name: name.to_owned(),
        colour: colour(at, name),
        pieces: series.lives.iter().filter(|life| life.name == name).map(piece).collect(),
    };
    names.into_iter().enumerate().map(line).collect()
}

fn of_windows(series: &Series) -> Vec<Line> {
    let line = |name: &str, colour, of: fn(&crate::series::Window) -> Option<f64>| Line {
        name: name.to_owned(),
        colour,
        pieces: vec![series.windows.iter().filter_map(|w| Some((w.seconds, of(w)?))).collect()],
    };
    vec![line("p50", COLOURS[0], |w| w.p50_ms), line("p99", COLOURS[1], |w| w.p99_ms)]
}

/// From values to places.
struct Scale {
    seconds: f64,
    least: f64,
    most: f64,
    logarithmic: bool,
}

impl Scale {
    /// From nothing to a round number above all.
    fn linear(lines: &[Line], seconds: f64) -> Self {
        let most = values(lines).fold(1.0, f64::max);
        let step = round_step(most / 4.0);
        Self { seconds, least: 0.0, most: (most / step).ceil() * step, logarithmic: false }
    }

    /// From one power of ten to another.
    fn logarithmic(lines: &[Line], seconds: f64) -> Self {
        let positive = || values(lines).filter(|value| *value > 0.0);
        let least = 10f64.powf(positive().fold(10.0, f64::min).log10().floor());
        let most = 10f64.powf(positive().fold(least * 10.0, f64::max).log10().ceil());
        Self { seconds, least, most, logarithmic: true }
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + seconds / self.seconds * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64, top: f64) -> f64 {
        let share = match self.logarithmic {
            true => (value.max(self.least) / self.least).log10() / (self.most / self.least).log10(),
            false => (value - self.least) / (self.most - self.least),
        };
        top + PANEL * (1.0 - share)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let powers = (self.most / self.least).log10().round() as i32;
            return (0..=powers).map(|power| self.least * 10f64.powi(power)).collect();
        }
        let step = round_step(self.most / 4.0);
        (0..).map(|n| f64::from(n) * step).take_while(|value| *value <= self.most * 1.001).collect()
    }

    /// The unit of the time axis, and where its ticks are, in seconds.
    fn times(&self) -> (&'static str, f64, Vec<f64>) {
        let (unit, seconds) = if self.seconds > 300.0 { ("minutes", 60.0) } else { ("seconds", 1.0) };
        let step = round_step(self.seconds / seconds / 8.0).max(1.0) * seconds;
        let ticks = (0..).map(|n| f64::from(n) * step).take_while(|at| *at <= self.seconds * 1.001).collect();
        (unit, seconds, ticks)
    }
}

fn panel(svg: &mut String, number: u32, what: &str, scale: &Scale, lines: &[Line]) {
    let top = TOP + f64::from(number) * (PANEL + BETWEEN) + 8.0;
    let (right, bottom) = (WIDTH - RIGHT, top + PANEL);
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{:.1}\" font-weight=\"bold\">{what}</text>", top - 6.0);
    for value in scale.ticks() {
        let y = scale.y(value, top);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            LEFT - 8.0,
            y + 4.0
        );
    }
    let (unit, of_unit, times) = scale.times();
    for at in times {
        let x = scale.x(at);
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {bottom}v5\" stroke=\"#333\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 18.0,
            at / of_unit
        );
    }
    let _ = writeln!(
        svg,
        "<path d=\"M{LEFT} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"#333\"/><text x=\"{right}\" y=\"{:.1}\" text-anchor=\"end\">{unit}</text>",
        bottom + 34.0
    );
    for (at, line) in lines.iter().enumerate() {
        draw(svg, scale, top, line);
        let (x, y) = (right + 12.0, top + 12.0 + 18.0 * at as f64);
        let _ = writeln!(
            svg,
            "<path d=\"M{x} {:.1}h18\" stroke=\"{}\" stroke-width=\"3\"/><text x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
            y - 4.0,
            line.colour,
            x + 24.0,
            escaped(&line.name)
        );
    }
}

/// A process that took another's place begins with a dot; so does one that was seen once, and would else not be seen.
fn draw(svg: &mut String, scale: &Scale, top: f64, line: &Line) {
    for (at, piece) in line.pieces.iter().enumerate() {
        let Some(first) = piece.first() else { continue };
        let mut path = String::new();
        for (n, (seconds, value)) in piece.iter().enumerate() {
            let command = if n == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.1}", scale.x(*seconds), scale.y(*value, top));
        }
        if piece.len() > 1 {
            let _ = writeln!(
                svg,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\"/>",
                line.colour
            );
        }
        if at > 0 || piece.len() == 1 {
            let (x, y) = (scale.x(first.0), scale.y(first.1, top));
            let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"1.8\" fill=\"{}\"/>", line.colour);
        }
    }
}

fn values(lines: &[Line]) -> impl Iterator<Item = f64> {
    lines.iter().flat_map(|line| line.pieces.iter().flatten()).map(|(_, value)| *value)
}

/// 1, 2 or 5 times a power of ten, and not below this.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least);
    factor.unwrap_or(10.0) * power
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_step_is_round_and_an_axis_ends_above_all() {
        assert_eq!([0.3, 1.0, 2.1, 7.0, 60.0].map(round_step), [0.5, 1.0, 5.0, 10.0, 100.0]);
        let line = |value| vec![Line { name: String::new(), colour: "", pieces: vec![vec![(1.0, value)]] }];
        let scale = Scale::linear(&line(37.0), 60.0);
        assert_eq!((scale.most, scale.ticks()), (40.0, vec![0.0, 10.0, 20.0, 30.0, 40.0]));
        assert_eq!(Scale::logarithmic(&line(37.0), 60.0).ticks(), [10.0, 100.0]);
        // Nothing at all to show is an empty panel.
        assert!(Scale::linear(&[], 1.0).ticks().len() > 1 && Scale::logarithmic(&[], 1.0).ticks().len() > 1);
    }

    #[test]
    fn every_life_is_a_piece_and_every_number_is_one() {
        let mut series = Series::new(Duration::from_secs(60));
        for at in 1..=60 {
            let (now, begin) = (Duration::from_secs(at), Duration::from_secs(at / 20 * 20));
            series.looked("gateway 0", begin, now, Held { memory_mib: at as f64, descriptors: at });
            series.looked(PROVER, Duration::ZERO, now, Held { memory_mib: 9.0, descriptors: 9 });
            series.answered(now, 1, vec![Duration::from_millis(at)]);
        }
        let svg = svg(&series, "a < b & c", "");
        assert_eq!(svg.matches("<circle").count(), 2 * 3, "lives after the first, in two panels");
        assert!(svg.contains("a &lt; b &amp; c") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        for what in
            ["resident memory, MiB", "open descriptors", "latency of answers, ms", "gateway 0", PROVER, "p99"]
        {
            assert!(svg.contains(what), "{what}");
        }
    }
}
