package api

import "time"

// EgressRecord is an egress decision, or several equal ones in quick succession.
type EgressRecord struct {
	ID      int64     `json:"id" doc:"Strictly increasing"`
	Time    time.Time `json:"time" doc:"Time of the first decision"`
	Last    time.Time `json:"last" doc:"Time of the last decision"`
	VMID    int       `json:"vmid"`
	JobID   string    `json:"job_id,omitempty" doc:"The job that was running"`
	Seq     int64     `json:"seq" doc:"Number in the log of the sandbox; 0 for the record of rule audit.limit, which counts the decisions without a record"`
	Proto   string    `json:"proto" doc:"tcp, udp, icmp, dns, or ip-N"`
	Name    string    `json:"name,omitempty" doc:"Name that the guest sent: in a DNS query, TLS or HTTP, or the name that last resolved to the address; other bytes than graphic ASCII are written \\DDD"`
	Addr    string    `json:"addr,omitempty"`
	Port    int       `json:"port,omitempty"`
	Allow   bool      `json:"allow"`
	Rule    string    `json:"rule" doc:"Rule that decided"`
	Error   string    `json:"error,omitempty" doc:"Why an allowed connection failed"`
	Count   int       `json:"count" doc:"Number of decisions in this record"`
	Dropped int       `json:"dropped,omitempty" doc:"Number of earlier decisions that exceeded the rate limit and were not recorded"`
}

// EgressSummary summarizes the egress decisions of a job.
type EgressSummary struct {
	Allowed int64          `json:"allowed" doc:"Number of allowed decisions"`
	Denied  int64          `json:"denied" doc:"Number of denied decisions"`
	Dropped int64          `json:"dropped,omitempty" doc:"Number of decisions without a record"`
	Targets []EgressTarget `json:"denied_targets,omitempty" doc:"Denied targets, most frequent first"`
	More    int            `json:"more_denied_targets,omitempty" doc:"Number of denied targets that are not listed"`
	Private []EgressTarget `json:"private_targets,omitempty" doc:"Used private targets that the operator opened"`
}

// EgressTarget is a target in an EgressSummary.
type EgressTarget struct {
	Proto string    `json:"proto"`
	Name  string    `json:"name,omitempty"`
	Addr  string    `json:"addr,omitempty"`
	Port  int       `json:"port,omitempty"`
	Rule  string    `json:"rule"`
	Count int64     `json:"count"`
	Last  time.Time `json:"last"`
}
