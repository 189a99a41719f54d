//! What must hold for any bytes as a file of options.

/// Takes the text of a file. `options` answers the arguments that it makes beside a command line, or what is wrong with it; the
/// file is named FILE there.
///
/// # Panics
/// When something does not hold.
pub(crate) fn check(data: &[u8], options: impl Fn(&str, &[&str]) -> Result<Vec<String>, String>) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let said = match options(text, &[]) {
        Ok(said) => said,
        Err(why) => {
            let place = why.strip_prefix("FILE:").expect("it names the file");
            let (line, why) = place.split_once(": ").expect("it names the line");
            let lines = text.bytes().filter(|byte| *byte == b'\n').count();
            assert!(line.parse().is_ok_and(|line| (1..=1 + lines).contains(&line)), "line {line} of {lines}");
            assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}");
            return;
        }
    };
    assert!(said.iter().all(|argument| argument.starts_with("--")), "{said:?}");
    // Comments and empty lines say nothing.
    let commented = format!("# wait = \"9s\"\n\n{text}\n# the end");
    assert_eq!(options(&commented, &[]).as_ref(), Ok(&said));
    // An option stands once, and what the command line says goes before the file.
    let repeated = format!("{text}\nwait = \"1s\"\n");
    let names_wait = |argument: &String| argument.starts_with("--wait=");
    match said.iter().any(names_wait) {
        true => assert!(options(&repeated, &[]).is_err(), "twice"),
        false => assert_eq!(options(&repeated, &[]), Ok([&said[..], &["--wait=1s".to_owned()]].concat())),
    }
    let rest: Vec<_> = said.iter().filter(|argument| !names_wait(argument)).cloned().collect();
    assert_eq!(options(text, &["--wait", "3s"]), Ok(rest));
}
