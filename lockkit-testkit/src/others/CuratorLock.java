// Takes and releases one lock with Apache Curator's InterProcessMutex, as it is told on standard input.
// Arguments: the servers, the session timeout in milliseconds, the path of the lock.

import java.io.*;
import java.nio.file.*;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.*;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

public class CuratorLock {
    public static void main(String[] arguments) throws Exception {
        int session = Integer.parseInt(arguments[1]);
        CuratorFramework client = CuratorFrameworkFactory.newClient(arguments[0], session, 10000, new RetryOneTime(100));
        client.start();
        InterProcessMutex mutex = new InterProcessMutex(client, arguments[2]);
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String order; (order = orders.readLine()) != null; ) {
            String[] words = order.split(" ");
            switch (words[0]) {
                case "acquire":
                    boolean acquired = mutex.acquire(Long.parseLong(words[1]), TimeUnit.MILLISECONDS);
                    System.out.println(acquired ? "acquired" : "refused");
                    break;
                case "release":
                    mutex.release();
                    System.out.println("released");
                    break;
                case "count":
                    Path counter = Paths.get(words[2]);
                    for (int round = Integer.parseInt(words[1]); round > 0; round--) {
                        mutex.acquire();
                        int count = Integer.parseInt(Files.readString(counter));
                        Thread.sleep(1);
                        Files.writeString(counter, Integer.toString(count + 1));
                        mutex.release();
                    }
                    System.out.println("counted");
                    break;
            }
        }
        client.close();
    }
}
