//! Who changes something, and why: for audit tables.

/// Text for an audit table: bounded, since it is stored for good.
pub(super) fn one_line(text: &str) -> Result<String, String> {
    const BYTES_MAX: usize = 1000;
    let text = text.trim();
    if text.is_empty() {
        return Err("must not be empty".into());
    }
    if text.len() > BYTES_MAX {
        return Err(format!("{} bytes long, the limit is {BYTES_MAX}", text.len()));
    }
    match text.contains(char::is_control) {
        true => Err("must be one line without control characters".into()),
        false => Ok(text.into()),
    }
}

/// Who runs the command.
pub(super) fn user_name() -> String {
    ["USER", "LOGNAME"]
        .iter()
        .filter_map(|name| std::env::var(name).ok())
        .find_map(|name| one_line(&name).ok())
        .unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()))
}
