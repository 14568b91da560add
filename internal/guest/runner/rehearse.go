package runner

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Rehearse does what a runner does first in every sandbox, before the runner knows
// which one it is in: it fetches a bootstrap document, from itself. Packages of the
// standard library do many things only the first time. An error is ignored: Run meets
// it again.
func Rehearse() {
	_, stop := signal.NotifyContext(context.Background(), os.Interrupt) // starts a thread
	stop()
	_ = rehearseFetch(Timing{}.withDefaults())
	_ = time.Now().String() // reads the time zone
}

func rehearseFetch(t Timing) error {
	ctx := context.Background()
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	srv := &http.Server{ReadHeaderTimeout: callTimeout, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(guestapi.BootstrapResponse{
			Git: &guestapi.Git{}, Env: map[string]string{"": ""}, Artifact: &guestapi.ArtifactTarget{}, Job: &guestapi.Job{}, Cache: &guestapi.RegistryCache{},
		})
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	a := newAPI("http://"+l.Addr().String(), t)
	var resp guestapi.BootstrapResponse
	err = a.call(ctx, callTimeout, http.MethodPost, guestapi.PathBootstrap, guestapi.BootstrapRequest{}, &resp)
	a.http.CloseIdleConnections()
	_ = srv.Close()
	<-done
	return err
}
