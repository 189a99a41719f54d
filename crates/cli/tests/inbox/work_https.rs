//! A service that is called over TLS: only one that is vouched for gets the message.

use testkit::{Answer, Authority, TlsFront, Upstream};
use tokio::task::block_in_place;

use crate::{Fixture, Run, message};

fn rows(inbox: &Fixture) -> i64 {
    inbox.sql("SELECT (SELECT count(*) FROM inbox_log) + (SELECT count(*) FROM inbox_leases)")
}

async fn service() -> Upstream {
    Upstream::start(|seen| Answer::new(201, format!("{{\"order\":{}}}", seen.number))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_with_a_certificate_of_a_named_authority_is_called_once() {
    let (inbox, authority, service) = (Fixture::new(), Authority::new(), service().await);
    let front = TlsFront::start(service.addr(), &authority.identity("IP:127.0.0.1"), None, true).await;
    let (url, ca) = (front.url("https") + "/orders?via=inbox", authority.path().display().to_string());
    for verdict in ["applied", "duplicate", "duplicate"] {
        let run = block_in_place(|| inbox.apply(&message("M1", 1), &["--http", &url, "--http-ca", &ca])).ok();
        assert_eq!(run.stdout, format!("{verdict}\n{{\"order\":1}}\n"));
    }
    // The roots of the machine are those of this file.
    inbox.write("m.json", message("M2", 1));
    let mut command = inbox.command(&["apply", "inbox.db", "m.json", "--http", &url]);
    command.env("SSL_CERT_FILE", authority.path());
    let run = block_in_place(|| Run::of(command.output().unwrap())).ok();
    assert_eq!(run.stdout, "applied\n{\"order\":2}\n");
    let seen = service.last();
    assert_eq!((seen.path(), seen.header("idempotency-key")), ("/orders?via=inbox", Some("\"M2\"")));
    assert_eq!((service.count(), front.connections()), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_nobody_vouches_for_gets_nothing_and_no_record_is_left() {
    let (inbox, service) = (Fixture::new(), service().await);
    let (authority, stranger) = (Authority::new(), Authority::new());
    let own = TlsFront::start(service.addr(), &authority.identity("IP:127.0.0.1"), None, true).await;
    let other = TlsFront::start(service.addr(), &authority.identity("DNS:other.example"), None, true).await;
    let plain = format!("https://{}/", service.addr());
    for (url, trusted, part) in [
        (own.url("https"), &stranger, "certificate"),
        (other.url("https"), &authority, "certificate"),
        (plain, &authority, "no TLS with"),
    ] {
        let ca = trusted.path().display().to_string();
        let args = ["--http", &url, "--http-ca", &ca, "--timeout", "30s"];
        let run = block_in_place(|| inbox.apply(&message("M1", 1), &args)).failed(75, part);
        assert!(run.stderr.contains("the message was not sent"), "{}", run.stderr);
        assert_eq!(rows(&inbox), 0);
    }
    assert_eq!(service.count(), 0);
}

#[test]
fn a_file_of_authorities_that_is_none_is_told_before_anything_is_done() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    inbox.write("notes.txt", "these are my notes");
    for (args, code, part) in [
        (&["--http", "https://localhost/", "--http-ca", "missing.pem"][..], 74, "--http-ca missing.pem"),
        (&["--http", "https://localhost/", "--http-ca", "notes.txt"], 2, "no certificate in it"),
        (&["--exec", "true", "--http-ca", "notes.txt"], 2, "--http"),
    ] {
        inbox.run(&[&["apply", "inbox.db", "m.json"], args].concat()).failed(code, part);
    }
    assert!(!inbox.path("inbox.db").exists());
}
