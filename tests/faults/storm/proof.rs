//! The resource that workers write to, and what the nemesis can do with it.

use std::{pin::Pin, time::Duration};

use libtest_mimic::{Failed, Trial};
use lockkit_testkit::history::{History, Rule, check};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::timeout,
};

use super::{Prey, Random, Register};
use crate::runtime;

/// The tests of this module.
pub(crate) fn trials() -> Vec<Trial> {
    let on_runtime = |name, test: fn() -> Pin<Box<dyn Future<Output = ()>>>| {
        Trial::test(format!("storm::{name}"), move || {
            runtime()?.block_on(test());
            Ok(())
        })
    };
    vec![
        on_runtime("whoever_is_caught_and_overtaken_loses_an_update_of_the_twin_alone", || {
            Box::pin(whoever_is_caught_and_overtaken_loses_an_update_of_the_twin_alone())
        }),
        on_runtime("a_worker_that_died_where_it_was_caught_is_no_hindrance", || {
            Box::pin(a_worker_that_died_where_it_was_caught_is_no_hindrance())
        }),
        Trial::test("storm::the_same_seed_gives_the_same_numbers", || {
            the_same_seed_gives_the_same_numbers();
            Ok::<_, Failed>(())
        }),
    ]
}

/// A worker, as the register sees one.
struct Client(BufReader<TcpStream>);

impl Client {
    async fn connect(register: &Register) -> Self {
        Self(BufReader::new(TcpStream::connect(register.addr()).await.expect("connect")))
    }

    async fn say(&mut self, line: &str) {
        self.0.write_all(format!("{line}\n").as_bytes()).await.expect("write");
    }

    async fn hear(&mut self) -> String {
        let mut answer = String::new();
        self.0.read_line(&mut answer).await.expect("read");
        answer.trim_end().to_owned()
    }

    async fn ask(&mut self, line: &str) -> String {
        self.say(line).await;
        self.hear().await
    }
}

async fn whoever_is_caught_and_overtaken_loses_an_update_of_the_twin_alone() {
    let register = Register::start().await.expect("start");
    let (mut one, mut two) = (Client::connect(&register).await, Client::connect(&register).await);
    assert_eq!(one.ask("claim w1 a 10").await, "1 0 0");
    let caught = register.catch(Prey::Writer);
    one.say("pass w1 a exclusive").await;
    let caught = caught.await;
    assert_eq!((caught.worker.as_str(), caught.key.as_str()), ("w1", "a"));
    assert!(timeout(Duration::from_millis(50), register.overtaken(&caught)).await.is_err(), "by whom?");
    assert_eq!(two.ask("claim w2 a 11").await, "1 0 0");
    assert_eq!(two.ask("pass w2 a exclusive").await, "go");
    assert_eq!(two.ask("write w2 a 11 0 0").await, "1");
    register.overtaken(&caught).await;
    drop(caught);
    assert_eq!(one.hear().await, "go");
    assert_eq!(one.ask("write w1 a 10 0 0").await, "0");
    assert_eq!(register.writes(), 2);
    let report = check(&History::new(register.record()));
    assert_eq!((report.admitted, report.refused, report.lost_on_twins), (1, 1, 1));
    assert_eq!(report.count(Rule::Resource), 0, "{:?}", report.violations);
}

async fn a_worker_that_died_where_it_was_caught_is_no_hindrance() {
    let register = Register::start().await.expect("start");
    let mut one = Client::connect(&register).await;
    one.ask("claim w1 a 10").await;
    let caught = register.catch(Prey::Writer);
    one.say("pass w1 a exclusive").await;
    let caught = caught.await;
    drop(one);
    drop(caught);
    // Nobody waits for this trap any more, so it catches nobody.
    assert!(timeout(Duration::from_millis(10), register.catch(Prey::Writer)).await.is_err());
    let mut two = Client::connect(&register).await;
    assert_eq!(two.ask("pass w2 a exclusive").await, "go");
}

fn the_same_seed_gives_the_same_numbers() {
    let numbers = |seed, purpose| {
        let mut random = Random::new(seed, purpose);
        [(); 4].map(|()| random.below(1_000_000))
    };
    assert_eq!(numbers(7, "w1"), numbers(7, "w1"));
    assert_ne!(numbers(7, "w1"), numbers(7, "w2"));
    assert_ne!(numbers(7, "w1"), numbers(8, "w1"));
    assert_eq!((Random::new(1, "").below(0), Random::new(1, "").pick::<u8>(&[])), (0, None));
}
