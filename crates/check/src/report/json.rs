//! The report for programs.

use super::Report;

impl Report {
    /// One JSON array of objects with `id`, `promise`, `source`, `verdict`, `sent`, `got` and `advice`.
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(&self.results).expect("texts alone are JSON");
        text.push('\n');
        text
    }
}
