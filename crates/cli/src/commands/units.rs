//! Durations and sizes as people write them.

use std::time::Duration;

/// `500ms`, `30s`, `2m`, `24h`, `7d`; a bare number is refused, since nobody could tell its unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    if text.bytes().all(|b| b.is_ascii_digit()) && text.trim_start_matches('0').is_empty() && !text.is_empty()
    {
        return Ok(Duration::ZERO);
    }
    // As in the engine: a typing error must not make a record immortal.
    const MAX: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
    match humantime::parse_duration(text) {
        Err(error) => Err(format!("{error}; write for example 500ms, 30s, 2m, 24h or 7d")),
        Ok(time) if time > MAX => Err("the limit is ten years".into()),
        Ok(time) => Ok(time),
    }
}

/// The same, and not nothing.
pub(crate) fn timeout(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        time if time < Duration::from_millis(1) => Err("at least 1ms: else it is up before it begins".into()),
        time => Ok(time),
    }
}

/// How long a reply is kept that somebody decided: not so short that a client's next try would run again.
pub(crate) fn reply_retention(text: &str) -> Result<Duration, String> {
    const MIN: Duration = Duration::from_secs(60);
    match duration(text)? {
        time if time < MIN => Err("at least 1m: after it the operation runs again".into()),
        time => Ok(time),
    }
}

/// `65536`, `64KiB`, `1MiB`, `2GiB`.
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err("write a number of bytes, or for example 64KiB, 1MiB".into()),
    };
    let number: usize =
        digits.parse().map_err(|_| "write a number of bytes, or for example 64KiB, 1MiB".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "too large".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_needed_and_known() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("24h"), Ok(Duration::from_secs(86_400)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert!(timeout("0").is_err() && timeout("1ms").is_ok());
        assert_eq!(duration("11years"), Err("the limit is ten years".into()));
        for wrong in ["", "5", "5 parsecs", "-1s"] {
            assert!(duration(wrong).unwrap_err().contains("30s"), "{wrong}");
        }
        assert_eq!(bytes("1MiB"), Ok(1 << 20));
        assert_eq!(bytes("65536"), Ok(65_536));
        for wrong in ["", "KiB", "1MB", "1.5MiB", "-1", "99999999999999999999"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(bytes("17179869184GiB"), Err("too large".into()));
    }
}
