//! The same servers with the other durability: those that forget beside those that wait for the disk.

use lockkit_testkit::servers::{
    MySqlFlavor, MySqlOptions, MySqlServer, Persistence, RedisFlavor, RedisOptions, RedisServer, ZooKeeperFlavor,
    ZooKeeperServer,
};

use super::{OF_DURABILITY, PrivateServer, Targets, name_of};
use crate::error::Result;

impl Targets {
    /// Adds private servers that are to the disk what the others are not, of what is installed: of Redis and ZooKeeper, which answer when a
    /// write is on disk (`appendfsync always`, `forceSync=yes`), and of MariaDB or MySQL, which does not wait for that
    /// (`innodb_flush_log_at_trx_commit=2`). Of them only a part is measured, which the disk has a say in.
    ///
    /// # Errors
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if an installed server does not come up.
    ///
    /// # Cancellation
    /// What was started ends.
    pub async fn with_other_durability(mut self) -> Result<Self> {
        let before = self.list.len();
        for flavor in [RedisFlavor::Installed, RedisFlavor::Newer] {
            let Ok(found) = flavor.program().find() else { continue };
            let options = RedisOptions::default().flavor(flavor).persistence(Persistence::AppendAlways);
            let server = RedisServer::start(options).await?;
            let (name, url) = (format!("redis {} fsync", found.version), server.url());
            self.start(name, url, vec![PrivateServer::of(server)]);
            break;
        }
        for (flavor, kind) in [(MySqlFlavor::Installed, "mariadb"), (MySqlFlavor::Newer, "mysql")] {
            let Ok(found) = flavor.program().find() else { continue };
            let options = MySqlOptions::default().flavor(flavor).args(["--innodb-flush-log-at-trx-commit=2"]);
            let server = MySqlServer::start(options).await?;
            let (name, url) = (format!("{kind} {} no fsync", found.version), format!("{}?create=true", server.url()));
            self.start(name, url, vec![PrivateServer::of(server)]);
            break;
        }
        for flavor in [ZooKeeperFlavor::Installed, ZooKeeperFlavor::Newer] {
            match ZooKeeperServer::start_with(flavor, &["-Dzookeeper.forceSync=yes"]).await {
                Ok(server) => {
                    let name = format!("{} fsync", name_of(&server).await?);
                    self.start(name, server.url(), vec![PrivateServer::of(server)]);
                    break;
                }
                Err(error) if error.is_missing() => {}
                Err(error) => return Err(error.into()),
            }
        }
        for target in &mut self.list[before..] {
            target.in_part = Some(OF_DURABILITY);
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use lockkit::Severity;

    use super::*;
    use crate::plan::Step;

    #[tokio::test(flavor = "multi_thread")]
    async fn those_wait_for_the_disk_that_do_not_otherwise() {
        let targets = Targets::default().with_other_durability().await.expect("started");
        let [redis, mysql, zookeeper] = targets.list() else { panic!("{targets:?}") };
        assert!(redis.name().ends_with(" fsync") && mysql.name().ends_with(" no fsync"), "{targets:?}");
        let version = zookeeper.name().strip_prefix("zookeeper ").and_then(|rest| rest.strip_suffix(" fsync"));
        assert!(version.is_some_and(|version| version.starts_with("3.")), "{targets:?}");
        assert!(targets.list().iter().all(|target| target.steps() == Step::IN_PART && !target.is_in_use()));
        let process = zookeeper.servers()[0].process().pid().expect("it runs");
        let arguments = std::fs::read_to_string(format!("/proc/{process}/cmdline")).expect("its arguments");
        let last = arguments.split('\0').rfind(|argument| argument.contains("forceSync"));
        assert_eq!(last, Some("-Dzookeeper.forceSync=yes"), "the last one wins");
        for (target, code, severity) in [(redis, "persistence", Severity::Ok), (mysql, "durability", Severity::Warning)]
        {
            let findings = lockkit::diagnose(target.url()).await.expect("asked");
            let found = findings.iter().find(|finding| finding.code == code).map(|finding| finding.severity);
            assert_eq!(found, Some(severity), "{findings:?}");
        }
    }
}
