// Command random prints random values of Go. With a file name as its argument it
// appends them to the file at each SIGUSR1.
package main

import (
	"crypto/rand"
	"fmt"
	"hash/maphash"
	"io"
	mrand "math/rand"
	mrand2 "math/rand/v2"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	if len(os.Args) < 2 {
		show(os.Stdout, "")
		return
	}
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGUSR1)
	for {
		f, err := os.OpenFile(os.Args[1], os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			panic(err)
		}
		show(f, "old-")
		if err := f.Close(); err != nil {
			panic(err)
		}
		<-again
	}
}

func show(w io.Writer, prefix string) {
	fmt.Fprintf(w, "%sgo-crypto %s\n", prefix, rand.Text())
	fmt.Fprintf(w, "%sgo-math %x\n", prefix, mrand.Uint64())
	fmt.Fprintf(w, "%sgo-math2 %x\n", prefix, mrand2.Uint64())
	fmt.Fprintf(w, "%sgo-maphash %x\n", prefix, maphash.String(maphash.MakeSeed(), "a"))
}
