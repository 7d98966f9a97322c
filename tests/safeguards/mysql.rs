//! The safeguards of MySQL and MariaDB.

use crate::list::safeguards;

const CONNECTION: &str = "lockkit-mysql/src/client/connection.rs";
const ORDER: &str = "lockkit-mysql/src/wire/order.rs";
const SHARING: &str = "lockkit-mysql/src/wire/sharing.rs";
const RELEASE: &str = "lockkit-mysql/src/store/release.rs";
const STATEMENTS: &str = "lockkit-mysql/src/wire/statements.rs";
const RENEW: &str = "lockkit-mysql/src/store/renew.rs";
const RECORDS: &str = "lockkit-mysql/src/store/records.rs";
const RAW: &str = "lockkit-mysql/src/client/raw.rs";
const FENCED: &str = "lockkit-mysql/src/fenced.rs";

safeguards! {
    in_doubt in CONNECTION
        "A connection with an open question does not go back to the pool"
        "if «!raw.is_in_doubt()» {" => "true"
        by "lockkit-mysql/mysql::mariadb::every_question_can_be_dropped_at_any_moment";
    reset in CONNECTION
        "A statement whose connection was reset may still be waiting at the server"
        "if «raw.finish_and_close(linger).await» {" => "true"
        by "lockkit-mysql/mysql::mariadb::a_statement_whose_connection_was_reset_takes_no_lock_for_nobody";
    no_chain in CONNECTION
        "No transaction follows another by itself, whatever the server is set to"
        "statements::text(«text(question)»), token" => r#"text(question).replace("COMMIT AND NO CHAIN NO RELEASE", "COMMIT")"#
        by "lockkit-mysql/mysql::mariadb::transactions_that_are_to_follow_each_other_hide_nothing";
    repeated_ask in ORDER
        "A claim that asks again for what it has shortens no lease"
        "«sql»\n    }\n\n    /// Prolongs the place of a claim in the queue, or" =>
        r#"sql.replace("SET expires = GREATEST(expires, ", "SET expires = COALESCE(NULL, ")"#
        by "lockkit-mysql/mysql::mariadb::a_repeated_request_shortens_no_lease";
    short_turn in CONNECTION
        "A turn lasts until the one whose it is can have heard of it"
        "statements::text(«text(question)»), token" => r#"text(question).replace("GREATEST(ttl, 1000000)", "ttl")"#
        by "lockkit-mysql/mysql::mariadb::a_short_ttl_leaves_time_for_the_turn";
    dead_in_the_middle in CONNECTION
        "A place that lapsed is not granted the lock with those around it"
        "statements::text(«text(question)»), token" => r#"text(question).replace("place > 0 AND kept >= CAST(@now AS DATETIME(6))", "place > 0")"#
        by "lockkit-mysql/mysql::mariadb::places_that_lapsed_in_the_middle_are_passed_over";
    lost_statement in "lockkit-mysql/src/client/in_flight.rs"
        "A connection of whose last statement nothing was heard counts as one that was replaced"
        "«self.reconnections.add_one()»;" => "()"
        by "lockkit-mysql/mysql::mariadb::a_statement_that_was_never_heard_of_is_counted";
    late_place in "lockkit-mysql/src/store/order.rs"
        "A claim that had nothing when it was released may come to have a place"
        "if «matches!(release, Release::Released { .. }) || read::<u64>(row, 3)? > 0» {" => "true"
        by "lockkit-mysql/mysql::mariadb::a_place_that_comes_after_its_release_is_found_by_the_next";
    late_place_of_a_lease in RELEASE
        "A claim whose lease has ended may come to have a place"
        "lock.is_shared() || «lock.has_queue()»" => "false"
        by "lockkit-mysql/mysql::mariadb::a_place_that_comes_after_its_lease_has_ended_is_found_by_the_next_release";
    leavers_take_turns in RELEASE
        "Claims that leave a queue at once leave connections for renewals"
        "let _slot = if «ends_in_order» {" => "false"
        by "lockkit-mysql/mysql::mariadb::those_that_leave_a_queue_at_once_leave_connections_for_renewals";
    own_connections in "lockkit-mysql/src/client/idle.rs"
        "Runtimes that share a store keep their connections"
        "(«idle.len() > free»).then(|| idle.remove(0))" => "!idle.is_empty()"
        by "lockkit-mysql/mysql::mariadb::two_runtimes_keep_their_connections";
    swept_claims in "lockkit-mysql/src/store/gc.rs"
        "The removal of what is unused reads no claims beside its page"
        "self.remove_claims(connection, start, «last»)" => "u64::MAX"
        by "lockkit-mysql/mysql::mariadb::a_removal_reads_no_claims_of_other_rows";
    released_late in "lockkit-mysql/src/store/order.rs"
        "A release that ends when the server takes no writes any more has an unknown effect"
        "let mut rows = «still_writable(connection.transact(text, token).await?)?»;" =>
        "{ let mut rows = connection.transact(text, token).await?; rows.pop(); rows }"
        by "lockkit-mysql/mysql::mariadb::what_is_released_while_a_server_becomes_a_replica_may_be_held";
    runtime_gone in CONNECTION
        "A statement of a runtime that is gone is waited for before its release"
        "self.idle.in_flight.add(«raw.claim()», permit, late)" => "raw.claim().filter(|_| Handle::try_current().is_ok())"
        by "lockkit-mysql/mysql::mariadb::a_statement_whose_runtime_is_gone_takes_no_lock_for_nobody";
    primary_s_number in STATEMENTS
        "A server that takes no writes tells of no lease that it is over"
        r#"«format!("{NUMBER} + {WRITABLE}")»"# => "NUMBER.to_owned()"
        by "lockkit-mysql/mysql::mariadb::a_former_primary_says_of_no_lease_that_it_is_over";
    locked_at_the_primary in STATEMENTS
        "A transaction at a server that takes no writes is not told that a lock is its own"
        r#"«format!("SELECT {WRITABLE}, {COLUMNS} FROM {table} WHERE id = {id} FOR UPDATE")»"# =>
        r#"format!("SELECT 0, {COLUMNS} FROM {table} WHERE id = {id} FOR UPDATE")"#
        by "lockkit-mysql/mysql::mariadb::a_transaction_is_told_nothing_by_a_former_primary";
    refusal_shakes in CONNECTION
        "A refusal of a server makes other connections look again"
        "self.hang_up();\n                    «self.idle.broke()»;" => "()"
        by "lockkit-mysql/mysql::mariadb::a_refused_statement_makes_other_connections_look_again";
    waiter_s_floor in CONNECTION
        "A claim that waits may ask again for a higher fence, and gets no lower one"
        "statements::text(«text(question)»), token" => r#"text(question).replace("fence = GREATEST(fence, ", "fence = COALESCE(fence, ")"#
        by "lockkit-mysql/mysql::mariadb::a_claim_that_waits_may_ask_for_a_higher_fence";
    alone_behind_queue in STATEMENTS
        "One that would share a lock does not pass those that wait"
        r#"«format!("NOT EXISTS (SELECT 1 FROM {claims} AS w FORCE INDEX (turns) WHERE {waits}) LIMIT 1")»"# => r#""TRUE LIMIT 1".to_owned()"#
        by "lockkit-mysql/mysql::mariadb::who_waits_in_the_queue_goes_before_one_that_comes_alone";
    release_behind_queue in RELEASE
        "The release of an exclusive lock in order serves those that wait"
        "let only_if_nobody_waits = «is_ordered && claim.mode == Mode::Exclusive»;" => "false"
        by "lockkit-mysql/mysql::mariadb::the_end_of_one_in_the_place_of_another_serves_the_queue";
    mark_by_number in CONNECTION
        "The mark of one that has a lock alone is no empty name"
        "statements::text(«text(question)»), token" =>
        r#"text(question).replace("ORD(node_info) = 1 AND SUBSTRING(node_info, 2, 10) REGEXP '^[0-9]{10}$'", "LEFT(node_info, 1) = CONVERT(CHAR(1) USING utf8mb4) COLLATE utf8mb4_unicode_ci")"#
        by "lockkit-mysql/mysql::mariadb::a_collation_that_ignores_the_mark_makes_no_second_holder";
    over_when_alone in CONNECTION
        "Claims that are over do not share the lock of one that had it alone"
        "statements::text(«text(question)»), token" => r#"text(question).replace("(c.place = 0 OR c.token = @owner)", "c.token = @owner")"#
        by "lockkit-mysql/mysql::mariadb::claims_that_are_over_do_not_come_back_with_the_next_group";
    joined_renewal in RENEW
        "A renewal looks for a lease that has become a claim"
        "if «claim.mode != Mode::Exclusive» && lock.is_shared()" => "false"
        by "lockkit-mysql/mysql::mariadb::a_renewal_and_a_release_find_out_that_others_came";
    // Records, and leases that outlive their clients.
    record_answer in RECORDS
        "A record was changed only if the answer is the one to that question"
        "match (done.rows_affected(), «terms::is_answer(&done, question)») {" => "done.rows_affected() < 2"
        by "lockkit-mysql/mysql::mariadb::a_change_of_a_record_is_not_taken_for_the_one_before";
    row_number in RAW
        "No question has a number that a row can have"
        "asked: «FIRST_QUESTION»," => "0"
        by "lockkit-mysql/mysql::mariadb::the_number_of_a_new_row_is_not_taken_for_that_of_a_question";
    last_writer_mysql in FENCED
        "A resource in MySQL remembers the last writer beside readers"
        r#"("0", «format!("IF(fence < {fence}, COALESCE(writer, fence), writer)")»)"# => r#"format!("IF(fence < {fence}, fence, writer)")"#
        by "lockkit-mysql/mysql::mariadb::readers_and_writers_that_come_at_once_are_admitted_in_some_order";
    answer_in_parts in RAW
        "A question that was dropped in the middle of its answer is led to its end"
        "if let Some(open) = «self.open.take()» {" => "None::<Open>"
        by "lockkit-mysql/mysql::mariadb::an_acquisition_that_is_dropped_within_an_answer_delays_no_release";
    caller_has_left in RAW
        "A statement that is only prepared when its caller leaves is not run"
        "let prepared = driver.prepare(question.sql()).await?;\n    «still()?»;" => "drop(still())"
        by "lockkit-mysql/mysql::mariadb::an_acquisition_that_is_dropped_within_an_answer_delays_no_release";
    join_behind_queue in SHARING
        "One that comes to others that share a lock does not pass those that wait"
        "nobody_waits = «self.has_no_queue()»,\n            commit = commit(question)\n        );\n        sql\n    }\n\n    /// Ends" => r#""TRUE""#
        by "lockkit-mysql/mysql::mariadb::one_that_comes_to_sharers_or_leaves_them_heeds_the_queue";
    leave_to_the_queue in SHARING
        "One that leaves others that share a lock serves those that wait"
        "nobody_waits = «self.has_no_queue()»,\n            delete" => r#""TRUE""#
        by "lockkit-mysql/mysql::mariadb::one_that_comes_to_sharers_or_leaves_them_heeds_the_queue";
    no_room in SHARING
        "No permit is given beyond the number"
        "let room = match «claim.mode» {" => "Mode::Shared"
        by "lockkit-mysql/mysql::mariadb::a_lapsed_permit_is_free_again";
    lapsed_share in SHARING
        "Leases of sharers that have lapsed do not pile up"
        "ORDER BY m.expires LIMIT 1) «> {NOW}»" => "IS NOT NULL"
        by "lockkit-mysql/mysql::mariadb::a_sharer_that_comes_or_leaves_removes_what_has_lapsed";
    lapsed_share_beside in SHARING
        "They don't where all that come die without leaving"
        "m.place = 0 AND «m.expires <= {NOW}»" => "FALSE"
        by "lockkit-mysql/mysql::mariadb::a_sharer_that_comes_or_leaves_removes_what_has_lapsed";
    claims_before_the_row in ORDER
        "A statement that waits for the table of claims has no row of a lock locked"
        r#"«format!("{BEGIN}{} WHERE FALSE; ", self.delete())»"# => "BEGIN.to_owned()"
        by "lockkit-mysql/mysql::mariadb::a_client_that_waits_for_the_table_of_claims_has_no_row_locked";
}
