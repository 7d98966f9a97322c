//! The safeguards of MySQL and MariaDB.

use crate::list::Safeguard;

const CONNECTION: &str = "lockkit-mysql/src/client/connection.rs";
const ORDER: &str = "lockkit-mysql/src/wire/order.rs";
const RELEASE: &str = "lockkit-mysql/src/store/release.rs";
const STATEMENTS: &str = "lockkit-mysql/src/wire/statements.rs";
const RENEW: &str = "lockkit-mysql/src/store/renew.rs";
const RECORDS: &str = "lockkit-mysql/src/store/records.rs";
const RAW: &str = "lockkit-mysql/src/client/raw.rs";
const FENCED: &str = "lockkit-mysql/src/fenced.rs";

pub(crate) const ALL: &[Safeguard] = &[
    Safeguard {
        name: "in_doubt",
        does: "A connection with an open question does not go back to the pool",
        file: CONNECTION,
        code: "if «!raw.is_in_doubt()» {",
        without: "true",
        noticed_by: "lockkit-mysql/mysql::mariadb::every_question_can_be_dropped_at_any_moment",
    },
    Safeguard {
        name: "reset",
        does: "A statement whose connection was reset may still be waiting at the server",
        file: CONNECTION,
        code: "closing.closed(if «is_done» { Instant::now() } else { sooner });",
        without: "true",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_statement_whose_connection_was_reset_takes_no_lock_for_nobody",
    },
    Safeguard {
        name: "no_chain",
        does: "No transaction follows another by itself, whatever the server is set to",
        file: CONNECTION,
        code: "statements::text(«text(question)»), token",
        without: r#"text(question).replace("COMMIT AND NO CHAIN NO RELEASE", "COMMIT")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::transactions_that_are_to_follow_each_other_hide_nothing",
    },
    Safeguard {
        name: "repeated_ask",
        does: "A claim that asks again for what it has shortens no lease",
        file: ORDER,
        code: "«sql»\n    }\n\n    /// Prolongs the place of a claim in the queue.",
        without: r#"sql.replace("SET expires = GREATEST(expires, ", "SET expires = COALESCE(NULL, ")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::a_repeated_request_shortens_no_lease",
    },
    Safeguard {
        name: "short_turn",
        does: "A turn lasts until the one whose it is can have heard of it",
        file: CONNECTION,
        code: "statements::text(«text(question)»), token",
        without: r#"text(question).replace("GREATEST(ttl, 1000000)", "ttl")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::a_short_ttl_leaves_time_for_the_turn",
    },
    Safeguard {
        name: "runtime_gone",
        does: "What a runtime that is gone had asked is waited for before its release",
        file: CONNECTION,
        code: "self.idle.in_flight.add(«raw.claim()», permit, late)",
        without: "raw.claim().filter(|_| Handle::try_current().is_ok())",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_statement_whose_runtime_is_gone_takes_no_lock_for_nobody",
    },
    Safeguard {
        name: "primary_s_number",
        does: "A server that takes no writes tells of no lease that it is over",
        file: STATEMENTS,
        code: r#"«format!("{NUMBER} + {WRITABLE}")»"#,
        without: "NUMBER.to_owned()",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_former_primary_says_of_no_lease_that_it_is_over",
    },
    Safeguard {
        name: "refusal_shakes",
        does: "What a server refuses makes other connections look again",
        file: CONNECTION,
        code: "self.hang_up();\n                    «self.idle.broke()»;",
        without: "()",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_refused_statement_makes_other_connections_look_again",
    },
    Safeguard {
        name: "waiter_s_floor",
        does: "A claim that waits may ask again for a higher fence, and gets no lower one",
        file: CONNECTION,
        code: "statements::text(«text(question)»), token",
        without: r#"text(question).replace("fence = GREATEST(fence, ", "fence = COALESCE(fence, ")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::a_claim_that_waits_may_ask_for_a_higher_fence",
    },
    Safeguard {
        name: "alone_behind_queue",
        does: "One that would share a lock does not pass those that wait",
        file: STATEMENTS,
        code: r#"«format!("NOT EXISTS (SELECT 1 FROM {claims} AS w FORCE INDEX (turns) WHERE {waits}) LIMIT 1")»"#,
        without: r#""TRUE LIMIT 1".to_owned()"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::who_waits_in_the_queue_goes_before_one_that_comes_alone",
    },
    Safeguard {
        name: "release_behind_queue",
        does: "The release of an exclusive lock in order serves those that wait",
        file: RELEASE,
        code: "let only_if_nobody_waits = «is_ordered && claim.mode == Mode::Exclusive»;",
        without: "false",
        noticed_by: "lockkit-mysql/mysql::mariadb::the_end_of_one_in_the_place_of_another_serves_the_queue",
    },
    Safeguard {
        name: "mark_by_number",
        does: "The mark of one that has a lock alone is no empty name",
        file: CONNECTION,
        code: "statements::text(«text(question)»), token",
        without: r#"text(question).replace("ORD(node_info) = 1 AND SUBSTRING(node_info, 2, 10) REGEXP '^[0-9]{10}$'", "LEFT(node_info, 1) = CONVERT(CHAR(1) USING utf8mb4) COLLATE utf8mb4_unicode_ci")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::a_collation_that_ignores_the_mark_makes_no_second_holder",
    },
    Safeguard {
        name: "over_when_alone",
        does: "Claims that are over do not share the lock of one that had it alone",
        file: CONNECTION,
        code: "statements::text(«text(question)»), token",
        without: r#"text(question).replace("(c.place = 0 OR c.token = @owner)", "c.token = @owner")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::claims_that_are_over_do_not_come_back_with_the_next_group",
    },
    Safeguard {
        name: "joined_renewal",
        does: "A renewal looks for a lease that has become a claim",
        file: RENEW,
        code: "if «claim.mode != Mode::Exclusive» && lock.is_shared()",
        without: "false",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_renewal_and_a_release_find_out_that_others_came",
    },
    // Records, and leases that outlive their clients.
    Safeguard {
        name: "record_answer",
        does: "A record was changed only if the answer is the one to that question",
        file: RECORDS,
        code: "match (done.rows_affected(), «value::is_answer(&done, question)») {",
        without: "done.rows_affected() < 2",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_change_of_a_record_is_not_taken_for_the_one_before",
    },
    Safeguard {
        name: "row_number",
        does: "No question has a number that a row can have",
        file: RAW,
        code: "asked: «FIRST_QUESTION»,",
        without: "0",
        noticed_by: "lockkit-mysql/mysql::mariadb::the_number_of_a_new_row_is_not_taken_for_that_of_a_question",
    },
    Safeguard {
        name: "last_writer_mysql",
        does: "A resource in MySQL remembers the last writer beside readers",
        file: FENCED,
        code: r#"("0", «format!("IF(fence < {fence}, COALESCE(writer, fence), writer)")»)"#,
        without: r#"format!("IF(fence < {fence}, fence, writer)")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::readers_and_writers_that_come_at_once_are_admitted_in_some_order",
    },
    Safeguard {
        name: "answer_in_parts",
        does: "A question that was dropped in the middle of its answer is led to its end",
        file: RAW,
        code: "if let Some(open) = «self.open.take()» {",
        without: "None::<Open>",
        noticed_by: "lockkit-mysql/mysql::mariadb::an_acquisition_that_is_dropped_within_an_answer_delays_no_release",
    },
    Safeguard {
        name: "caller_has_left",
        does: "A statement that is only prepared when its caller leaves is not run",
        file: RAW,
        code: "let prepared = driver.prepare(question.sql()).await?;\n    «still()?»;",
        without: "drop(still())",
        noticed_by: "lockkit-mysql/mysql::mariadb::an_acquisition_that_is_dropped_within_an_answer_delays_no_release",
    },
    Safeguard {
        name: "claims_before_the_row",
        does: "What waits for the table of claims does so without the row of a lock",
        file: ORDER,
        code: r#"«format!("{BEGIN}{} WHERE FALSE; ", self.delete())»"#,
        without: "BEGIN.to_owned()",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_client_that_waits_for_the_table_of_claims_has_no_row_locked",
    },
];
