//! The functions of the transactional mode, in the store's schema.
//!
//! The connection is the caller's, so nothing is prepared on it; what is in a function the server plans once a session,
//! whoever lends the connection. They run with the rights of who calls them.

use tokio_postgres::types::Type;

use crate::error::Fault;
use crate::schema::Place;
use crate::session::{Call, Part, SYNCHRONOUS_WEAK, Session, Sql};

/// The code of a claim that was sent to another store than it was meant for.
pub(crate) const ANOTHER_STORE: &str = "ONC01";
/// The code of a completion whose claim is not there.
pub(crate) const CLAIM_GONE: &str = "ONC02";

const CLAIM_TYPES: &str = "uuid, bigint, bigint, text, text, text, uuid, text";
const COMPLETE_TYPES: &str = "tid, uuid, bigint, bytea, bytea, bigint";

/// A function as it is to be.
#[derive(Debug)]
struct Function {
    /// With its schema and the types of its parameters.
    signature: String,
    declaration: String,
    body: String,
}

/// The call that claims: with the store, the milliseconds to wait, the number of the lock, scope, key, fingerprint, token
/// and origin. It answers the place of the new record, or NULL where there may be one or somebody has the lock.
pub(crate) fn call_claim(place: &Place) -> String {
    format!("SELECT {}.idempotency_claim($1::uuid, $2, $3, $4, $5, $6, $7::uuid, $8)::text", place.quoted())
}

/// The call that completes: with the place, the token, the status, the head, the body and the retention in microseconds. It
/// answers the moment in microseconds, or fails.
pub(crate) fn call_complete(place: &Place) -> String {
    format!("SELECT {}.idempotency_complete($1::tid, $2::uuid, $3, $4, $5, $6)", place.quoted())
}

/// Makes those that are missing or were made by an earlier release; `may_replace` is false where a later one made them.
///
/// # Errors
/// The fault; in a transaction, which is not ended.
pub(crate) async fn prepare(
    session: &mut Session<'_>,
    place: &Place,
    store_id: [u8; 16],
    may_replace: bool,
) -> Result<(), Fault> {
    let functions = [claim(place, store_id), complete(place)];
    let found = Sql {
        text: "SELECT p.prosrc FROM pg_catalog.pg_proc AS p WHERE p.oid = to_regprocedure($1)".into(),
        types: &[Type::TEXT],
    };
    let calls: Vec<_> =
        functions.iter().map(|function| Call::new(&found, vec![&function.signature])).collect();
    let results = session.run(&calls, Part::Middle).await?;
    for (function, rows) in functions.iter().zip(results) {
        let is_right = match rows.first() {
            Some(row) => !may_replace || row.try_get::<_, &str>(0)? == function.body,
            None => false,
        };
        if !is_right {
            let Function { declaration, body, .. } = function;
            session
                .execute(&format!("CREATE OR REPLACE FUNCTION {declaration} AS $onlyonce${body}$onlyonce$"))
                .await?;
        }
    }
    Ok(())
}

// The insert waits for nobody but strangers who take no notice of the lock; the limit is set back with the function's
// end. The unique index decides: see `inside`.
fn claim(place: &Place, store_id: [u8; 16]) -> Function {
    let (schema, table) = (place.quoted(), place.keys());
    let id: String = store_id.iter().map(|byte| format!("{byte:02x}")).collect();
    Function {
        signature: format!("{schema}.idempotency_claim({CLAIM_TYPES})"),
        declaration: format!(
            "{schema}.idempotency_claim(store uuid, wait_ms bigint, lock_number bigint, its_scope text, its_key text,
                its_hash text, its_token uuid, its_origin text)
             RETURNS tid LANGUAGE plpgsql SET lock_timeout = 0"
        ),
        body: format!(
            "
DECLARE
    moment timestamptz;
    place tid;
BEGIN
    IF store <> '{id}' THEN
        RAISE EXCEPTION 'the claim is for another store' USING ERRCODE = '{ANOTHER_STORE}';
    END IF;
    IF {SYNCHRONOUS_WEAK} THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF NOT pg_try_advisory_xact_lock(lock_number) THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('lock_timeout', wait_ms::text, true);
    moment := clock_timestamp();
    INSERT INTO {table} AS t (scope, key, request_hash, status, locked_until, created_at, claimed_at, token,
        attempt, on_lease_end, origin)
    VALUES (its_scope, its_key, its_hash, 'in_progress', moment, moment, moment, its_token, 1, 'hold', its_origin)
    ON CONFLICT (scope, key) DO NOTHING RETURNING t.ctid INTO place;
    RETURN place;
END
"
        ),
    }
}

// By its place: a plan that was made while the table was small must not read all of it, nor lock all of it under
// SERIALIZABLE; nor an index, which a condition on the bare status would allow.
fn complete(place: &Place) -> Function {
    let (schema, table) = (place.quoted(), place.keys());
    Function {
        signature: format!("{schema}.idempotency_complete({COMPLETE_TYPES})"),
        declaration: format!(
            "{schema}.idempotency_complete(place tid, its_token uuid, code bigint, head bytea, body bytea,
                retention_us bigint)
             RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off"
        ),
        body: format!(
            "
DECLARE
    moment timestamptz := clock_timestamp();
BEGIN
    UPDATE {table} AS t SET status = 'completed', response_code = code, response_headers = head,
        response_body = body, completed_at = moment, expires_at = moment + retention_us * interval '1 microsecond'
    WHERE t.ctid = place AND t.token = its_token AND t.status || '' IN ('in_progress', 'unknown');
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the claim is not there' USING ERRCODE = '{CLAIM_GONE}';
    END IF;
    RETURN extract(epoch FROM moment) * 1000000;
END
"
        ),
    }
}
